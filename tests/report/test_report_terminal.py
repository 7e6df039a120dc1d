import dataclasses
import io
import re
import sys

import pytest
from rich.color import Color, ColorSystem
from rich.console import Console
from rich.style import Style

from specjax.errors import SpecjaxError
from specjax.report import terminal
from specjax.report.labels import format_against
from specjax.report.palette import ORIGINS
from tests import processes


@dataclasses.dataclass(frozen=True)
class Piece:
    text: str
    origin: str


def printed(renderable, **options) -> str:
    stream = io.StringIO()
    settings = {"force_terminal": True, "color_system": "truecolor", "width": 160, "legacy_windows": False, **options}
    Console(file=stream, **settings).print(renderable)
    return stream.getvalue()


def plain(renderable) -> str:
    return printed(renderable, force_terminal=False, color_system=None)


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_origins_differ_in_colour():
    outputs = {printed(terminal.render_pieces([Piece("token", origin)])) for origin in ORIGINS}
    assert len(outputs) == len(ORIGINS)


def test_origins_of_new_tokens_differ_without_colour():
    outputs = {
        printed(terminal.render_pieces([Piece("token", origin)]), no_color=True)
        for origin in ("accepted", "corrected", "bonus")
    }
    assert len(outputs) == 3
    assert len({ORIGINS[origin].brackets for origin in ("accepted", "corrected", "bonus")}) == 3


def test_origin_colours_can_be_read_on_their_backgrounds():
    for origin in ORIGINS.values():
        assert contrast(origin.tone.light, "#f5f7f9") >= 4.5
        assert contrast(origin.tone.dark, "#1b212a") >= 4.5


@pytest.mark.parametrize("colours", [ColorSystem.TRUECOLOR, ColorSystem.EIGHT_BIT])
def test_generated_text_can_be_read_on_black_and_on_white(colours):
    """The accepted part, most of it, has the terminal's own colour; the rest one that no terminal rounds."""
    assert Style.parse(ORIGINS["accepted"].rich_style).color in (None, Color.default())
    for name in ORIGINS.keys() - {"accepted"}:
        color = Style.parse(ORIGINS[name].rich_style).color
        assert color is not None
        shown = color.downgrade(colours).get_truecolor().hex
        assert min(contrast(shown, "#ffffff"), contrast(shown, "#000000")) >= 4.5


def test_tables_fit_eighty_columns_with_every_row_on_a_line_of_its_own(results):
    """But the bounds of figures, which break at spaces."""
    for table in (terminal.comparison_table(results["comparison"]), terminal.decoding_table(results["decoding"])):
        lines = printed(table, width=80, force_terminal=False, color_system=None).splitlines()
        assert max(map(len, lines)) <= 80
        assert not [line for line in lines if "…" in line]
        rows = [line for line in lines if re.match(r"  \w", line)]
        assert all(len(re.split(r" {2,}", line.strip())) > 4 for line in rows), "a row is broken"
    figures = printed(terminal.figures_table(results["figures"]), width=80, force_terminal=False, color_system=None)
    assert all(figure["key"] in figures for figure in results["figures"])
    assert "MISSED" in figures


def test_a_figure_is_printed_with_the_digits_that_decide():
    figure = {"key": "speedup_predicted_error", "value": 0.10013, "bound": "<= 0.10", "ok": False}
    assert re.search(r"error +0\.1001 +<= 0\.10 +MISSED", plain(terminal.figures_table([figure])))
    assert [format_against(value, ">= 0.4") for value in (0.4, 0.39996, 0.41, None, 1234567.0)] == [
        *("0.400", "0.39996", "0.410", "not measured", "1,234,567"),
    ]


def test_a_figure_without_a_bound_is_neither_ok_nor_missed():
    table = terminal.figures_table([{"key": "ar_tokens_per_s", "value": 1.0, "ok": True}])
    [line] = [line for line in plain(table).splitlines() if "ar_tokens" in line]
    assert line.split() == ["ar_tokens_per_s", "1.000"]


def test_one_prompt_is_no_prompts(results):
    rows = [{**row, "prompts": 1} for row in results["comparison"]]
    assert "(1 prompt)" in plain(terminal.comparison_table(rows))


def test_speedups_are_told_at_the_length_that_other_prompts_chose():
    def row(drafter, k, speedup, temperature=0.0, batch_size=1):
        return {"drafter": drafter, "k": k, "speedup": speedup, "temperature": temperature, "batch_size": batch_size}

    decoding = [
        *(row("autoregressive", None, 1.0), row("draft_after", 1, 1.4), row("draft_after", 3, 1.2)),
        *(row("hybrid", 3, 1.25), row("adaptive", 7, 1.3), row("draft_after", 3, 9.0, batch_size=8)),
        row("draft_after", 3, 9.0, temperature=1.0),
    ]
    compared = [{"source": name, "temperature": 0.0, "drafter": "draft_after", "k": 3, "prompts": 12} for name in "ab"]
    assert [*terminal.speedups(decoding, compared)] == [
        "times plain decoding (greedy, k = 3, 12 prompts): draft, adaptive length 1.30, n-gram lookup, else a draft "
        "1.25, draft after distillation 1.20"
    ]
    assert [*terminal.speedups(decoding, [])] == []


def test_text_is_shown_as_it_is_never_as_markup():
    text = "[bold red]x[/bold red] [link=file:///etc]y[/link] :smile: \\["
    assert terminal.render_pieces([Piece(text, "accepted")]).plain == text
    assert text in plain(terminal.render_pieces([Piece(text, "accepted")]))
    figure = {"key": "[red]k[/red]", "value": "[red]v[/red]", "bound": "[/]", "ok": True}
    table = plain(terminal.figures_table([figure]))
    assert all(part in table for part in ("[red]k[/red]", "[red]v[/red]", "[/]"))
    assert "[red]d[/red]" in plain(
        terminal.decoding_table([{"drafter": "[red]d[/red]", "k": 3, "batch_size": 1, "temperature": 0.0}])
    )


def test_the_comparison_has_a_section_a_source_and_temperature(results):
    lines = plain(terminal.comparison_table(results["comparison"])).splitlines()
    at = next(i for i, line in enumerate(lines) if "code, greedy (6 prompts)" in line)
    cells = [re.split(r" {2,}", line.strip()) for line in lines[at + 1 : at + 4]]
    assert cells[0] == ["autoregressive", "–", "–", "–", "–", "850.2"]
    assert cells[2] == ["draft after distillation", "5", "0.860", "3.910", "3.61 to 4.16", "1,173"]


def test_escape_sequences_in_text_do_not_reach_the_terminal():
    hostile = "a\x1b]0;title\x07b\x9b2Jc\rd\u202ee"
    assert plain(terminal.render_pieces([Piece(hostile, "bonus")])).strip() == "a␛]0;title␇b\\u009b2Jc␍d\\u202ee"


def test_whitespace_of_code_is_kept():
    text = "def f():\n    return 1\n\n\n"
    assert terminal.render_pieces([Piece(text[:9], "accepted"), Piece(text[9:], "corrected")]).plain == text


def test_unknown_origin_is_refused_with_the_known_ones():
    with pytest.raises(SpecjaxError, match=r"'guessed'.*accepted, corrected, bonus"):
        terminal.render_pieces([Piece("x", "guessed")])


def test_legend_shows_every_origin_in_its_own_style():
    legend = terminal.legend()
    assert len(legend.plain.splitlines()) == len(ORIGINS)
    for name, origin in ORIGINS.items():
        shown = printed(terminal.render_pieces([Piece(name, name)])).strip()
        assert shown in printed(legend)
        assert origin.meaning in legend.plain


def test_missed_figures_are_marked(results):
    lines = plain(terminal.figures_table(results["figures"])).splitlines()
    missed = [line for line in lines if "MISSED" in line]
    assert len(missed) == 1
    assert "speedup_greedy" in missed[0]
    assert "1.149" in missed[0]
    assert sum(" ok " in line for line in lines) == len(results["figures"]) - 1


def test_the_bold_row_of_a_group_has_the_largest_speedup(results):
    """Single turns may be of a faster spell of the machine, which a speedup knows and tokens a second do not."""
    group = [row for row in results["decoding"] if (row["batch_size"], row["temperature"]) == (1, 0.0)]
    fast = max(group, key=lambda row: row["speedup"])
    rows = [{**row, "tokens_per_s": 9999.0} if row["drafter"] == "ngram" else row for row in group]
    table = terminal.decoding_table(rows)
    [bold] = [i for i, row in enumerate(table.rows) if row.style == "bold"]
    assert str(list(table.columns[2].cells)[bold]) == format_against(fast["tokens_per_s"], "")


def test_decoding_table_has_every_row_and_bolds_the_fastest_of_each_group(results):
    table = terminal.decoding_table(results["decoding"])
    groups = 4
    assert table.row_count == len(results["decoding"]) + groups
    assert sum(row.style == "bold" for row in table.rows) == groups
    assert "batch 8, temperature 1" in plain(table)


def test_rows_may_be_objects_as_well_as_mappings(results):
    row = dataclasses.make_dataclass("Row", results["decoding"][1])(**results["decoding"][1])
    assert plain(terminal.decoding_table([row])) == plain(terminal.decoding_table([results["decoding"][1]]))


def test_terminal_views_do_not_load_matplotlib():
    code = "import sys, specjax.report.terminal; sys.exit('matplotlib' in sys.modules)"
    assert processes.run([sys.executable, "-c", code]).returncode == 0
