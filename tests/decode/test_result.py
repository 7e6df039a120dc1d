"""Text of a generation, whole and as it is committed."""

from __future__ import annotations

import pytest

from specjax.decode.result import Piece, cut_pieces

TEXT = "naïve €5 🙂!"
TOKENS = list(TEXT.encode())  # every byte a token
ORIGINS = ["accepted" if i % 3 else "bonus" for i in range(len(TOKENS))]


def detokenize(tokens):
    return bytes(tokens).decode("utf-8", errors="replace")


def test_pieces_join_to_the_text_and_a_split_character_goes_with_its_last_byte():
    pieces = cut_pieces(detokenize, [], TOKENS, ORIGINS)
    assert "".join(piece.text for piece in pieces) == TEXT
    assert cut_pieces(detokenize, [], TOKENS[2:4], ["bonus", "accepted"]) == [Piece("ï", "accepted")]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("broken", [False, True], ids=["whole", "cut inside a character"])
def test_events_of_any_size_join_to_the_text(size, broken):
    tokens = TOKENS[:-2] if broken else TOKENS
    got = ""
    for start in range(0, len(tokens), size):
        end = min(start + size, len(tokens))
        pieces = cut_pieces(detokenize, tokens[:start], tokens[start:end], ORIGINS[start:end], end == len(tokens))
        got += "".join(piece.text for piece in pieces)
    assert got == detokenize(tokens)


def test_bytes_that_are_no_text_are_shown_once():
    tokens = [*b"a", 0xFF, 0xFE, *b"b"]
    got = [cut_pieces(detokenize, tokens[:i], tokens[i : i + 1], ["bonus"], i == 3) for i in range(4)]
    assert "".join(piece.text for pieces in got for piece in pieces) == "a\ufffd\ufffdb"
