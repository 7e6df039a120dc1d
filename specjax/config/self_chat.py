"""The config of chats that the target writes by itself."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from specjax.config.fields import STRICT, Grid, Name, Positive

Temperature = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
OPENINGS = (
    "Write a Python function that",
    "Here is some code:\n```python\n",
    "Write a SQL query that",
    "Explain what this error means:",
    "A shop sells",
    "How many",
    "Calculate",
    "Solve the equation",
    "Summarize the following article in three sentences:\n",
    "Write a short summary of this news report.\n\n",
    "What are the main points of this text?\n\n",
    "Read the text and answer the question.\n\nText:",
    "Answer the question with the help of these passages.\n\nPassage 1:",
    "Translate the following sentence into English:\n",
    "Translate this German sentence into English:\n",
    "Translate into German:",
    "Schreibe",
    "Écris",
    "¿Cuál es",
    "请",
    "Write a short story about",
    "Write an email to",
    "Give me five ideas for",
    "What is the difference between",
    "Why do",
    "Who was",
    "Imagine that you are",
    "Rewrite this paragraph so that",
)


@dataclass(frozen=True, config=STRICT)
class SelfChat:
    """Chats in which the target writes both sides (2406.08464): its chat template is cut before the user's words, it
    goes on with a question, and then it answers."""

    chats: Positive = 2_000
    """Number of chats to begin, in whole shards; the filters drop some of them. A directory with fewer is added to."""
    system: Name | None = None
    """System message with which every chat begins; None: none, or the template's own."""
    openings: tuple[Name, ...] = OPENINGS
    """First words of questions, for kinds of text that the target would rarely begin by itself: other languages, code,
    arithmetic."""
    opened: Share = 0.5
    """Share of the chats that begin with one of `openings`."""
    question_temperature: Annotated[float, Field(gt=0)] = 0.8
    answer_temperatures: Annotated[tuple[Temperature, ...], *Grid] = (0.0, 0.7, 1.0)
    """Temperatures of the answers; each chat has one of them."""
    question_tokens: Positive = 320
    """Most tokens of a question, which may carry a text with it. A longer one is cut, and its chat dropped."""
    answer_tokens: Positive = 256
    """Most tokens of an answer. A longer one is cut, and its chat ends there."""
    another_turn: Share = 0.25
    """Chance that a chat goes on with another question after an answer."""
    turns: Positive = 3
    """Most questions of a chat."""
    repeated: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Largest share of a message's tokens that may repeat what stands before in the message."""
    similar: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Largest share of a chat's runs of tokens that may stand in earlier chats."""
    shard_size: Positive = 128
    """Number of chats of a shard."""
    rows: Positive | None = None
    """Number of chats that are written at a time. None: 64 on CPU and 256 on accelerators, fewer if their caches take
    more than a quarter of the memory."""
    path: Name | None = None
    """Directory of the chats, which several runs may share; None: `self-chat` in the run's."""
