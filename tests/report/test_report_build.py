import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from specjax import report
from specjax.errors import SpecjaxError


class Page(HTMLParser):
    """Collects what a browser would load or run, and the text it would show."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str | None] = []
        self.text = ""
        self.sample: list[tuple[str, str]] = []
        self.open: list[tuple[str, str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text += data
        if ("pre", "sample") in self.open:
            self.sample.append((self.open[-1][1].split()[0], data))


def page(directory: Path) -> tuple[str, Page]:
    html = (directory / "report.html").read_text(encoding="utf-8")
    return html, Page(html)


def test_build_writes_every_file_and_leaves_no_temporary_one(built):
    assert built.name == "report"
    assert sorted(path.name for path in built.iterdir()) == [
        "lengths.png",
        "report.html",
        "report.md",
        "speedup.png",
        "summary.json",
        "training.png",
    ]
    assert (built / "speedup.png").read_bytes().startswith(b"\x89PNG")


def test_summary_json_is_the_summary_with_date_machine_and_figures(plotless, save):
    plotless["summary"]["draft_nll"] = float("nan")
    summary = json.loads(
        (report.build(save(plotless)) / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    assert summary["speedup_t1"] == 1.52
    assert summary["draft_nll"] is None
    assert summary["date"] == plotless["date"]
    assert summary["machine"] == plotless["machine"]
    assert summary["figures"] == [{"counted": False, **figure} for figure in plotless["figures"]]


def test_before_and_after_are_told_by_source_beside_plain_decoding(built):
    markdown = (built / "report.md").read_text(encoding="utf-8")
    section = markdown.split("## Before and after")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith(("| code", "| prose"))]
    assert rows[:3] == [
        "| code | greedy | autoregressive | – | – | – | – | 850.2 |",
        "| code | greedy | draft before distillation | 5 | 0.700 | 2.640 | 2.34 to 2.89 | 792.0 |",
        "| code | greedy | draft after distillation | 5 | 0.860 | 3.910 | 3.61 to 4.16 | 1,173 |",
    ]
    assert len(rows) == 2 * 2 * 3
    _, parsed = page(built)
    assert "prose\ntemperature 1\nautoregressive" in parsed.text
    assert "3.61 to 4.16" in parsed.text


def test_lengths_that_were_chosen_are_told_and_drawn(built):
    markdown = (built / "report.md").read_text(encoding="utf-8")
    section = markdown.split("## Lengths that were chosen")[1].split("\n## ")[0]
    assert "| 8 | greedy | 0.991 | 40, 2, 0, 4 | 2 |" in section
    assert "lengths.png" in section
    assert "Lengths that were chosen" in page(built)[1].text


def test_what_bounds_each_pass_is_told(built):
    markdown = (built / "report.md").read_text(encoding="utf-8")
    section = markdown.split("## What bounds a pass")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "batch" not in line]
    rows = [row for row in rows if len(row) == 7 and "-" not in row[1]]
    assert [(row[0], row[3], row[6]) for row in rows] == [
        ("target, 1 token", "memory", "69%"),
        ("block of 3", "compute", "50%"),
    ]
    assert "Below 9.300 FLOP a byte" in page(built)[1].text


def test_training_is_told_beside_decoding(built):
    text, markdown = page(built)[1].text, (built / "report.md").read_text()
    assert "| 1 | 0.701 | 0.861 | 0.212 | 0.902 |\n| 2 | 0.690 | 0.857 | 0.231 | – |\n" in markdown
    assert "| draft after distillation | greedy | 5 | 5.012 | 4.10 to 5.90 | 4.987 |" in markdown
    assert "- `draft`, loaded again after its export: 38 arrays and all settings equal." in markdown
    assert "\n3\n0.680\n" in text
    assert "4.987" in text
    assert "38 arrays and all settings equal" in text


def test_page_loads_nothing_and_runs_nothing(built):
    html, parsed = page(built)
    assert "script" not in parsed.tags
    assert "link" not in parsed.tags
    assert parsed.references
    assert all(reference and reference.startswith("#") for reference in parsed.references)
    assert not re.search(r"https?://|@import|url\((?!#)", html)


def test_page_has_all_plots_inline_and_they_follow_the_theme(built):
    html, parsed = page(built)
    assert parsed.tags.count("svg") == 3 + 4 + 1 + 2  # training, speedup by batch and temperature, lengths, acceptance
    assert parsed.open == []
    assert "var(--draft-after)" in html
    drawings = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert not re.search(r"(stroke|fill): #", drawings), "a fixed colour vanishes in one of the themes"


def test_every_reference_inside_a_plot_is_defined_once_a_plot(built):
    html, _ = page(built)
    for drawing in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        defined = re.findall(r'\bid="([^"]+)"', drawing)
        used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', drawing)
        assert len(defined) == len(set(defined))
        assert {one or other for one, other in used} <= set(defined)


def test_sample_keeps_text_and_whitespace_and_marks_each_origin(results, built):
    _, parsed = page(built)
    sample = results["sample"]
    expected = [("prompt", sample["prompt"]), *((piece["origin"], piece["text"]) for piece in sample["pieces"])]
    assert "<script>alert" in "".join(text for _, text in expected)
    merged: list[tuple[str, str]] = []
    for origin, text in parsed.sample:  # the parser may split one text node
        if text.strip("\n") or origin != "sample":
            merged.append((origin, text))
    assert "".join(text for _, text in merged).rstrip("\n") == "".join(text for _, text in expected).rstrip("\n")
    assert {origin for origin, _ in merged} == {"prompt", "accepted", "corrected", "bonus"}


def test_markup_in_any_text_is_escaped(results, save):
    hostile = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    results["name"] = results["command"] = results["config_yaml"] = hostile
    results["machine"]["cpu"] = results["figures"][0]["bound"] = results["decoding"][1]["drafter"] = hostile
    results["training"]["control"] = {hostile + " $x_{$": results["training"]["distill"]}
    _, parsed = page(report.build(save(results)))
    assert "script" not in parsed.tags
    assert "img" not in parsed.tags
    assert parsed.text.count(hostile) >= 7


def test_control_and_override_characters_are_shown_not_obeyed(plotless, save):
    plotless["sample"]["pieces"] = [{"text": "a\x1b[31m\x00\u202eb\ud800", "origin": "accepted"}]
    directory = report.build(save(plotless))
    for name in ("report.html", "report.md"):
        text = (directory / name).read_text(encoding="utf-8")
        assert not set("\x1b\x00\u202e") & set(text)
        assert "a␛[31m␀\\u202eb\\ud800" in text


def test_missed_figures_are_named_and_marked(results, built):
    html, parsed = page(built)
    assert html.count("✗ <strong>missed</strong>") == 1
    assert html.count("✓ ok") == len(results["figures"]) - 1
    assert "6 of 7 figures reached" in parsed.text
    markdown = (built / "report.md").read_text()
    assert "| speedup_greedy | 1.149 | >= 1.15 (timing) | ✗ **missed** |" in markdown


def test_value_just_below_its_bound_is_not_rounded_up_to_it(built):
    _, parsed = page(built)
    assert "1.149×" in parsed.text


@pytest.mark.parametrize("lossless", [True, False])
def test_a_lossy_verifier_is_labelled_with_its_distance(plotless, save, lossless):
    distance = {} if lossless else {"total_variation": 0.25, "total_variation_of_exact_sampling": 0.0062}
    plotless["verifier"] = {"kind": "lenient", "lossless": lossless, **distance}
    directory = report.build(save(plotless))
    for name in ("report.md", "report.html"):
        text = (directory / name).read_text()
        assert ("0.25" in text) is ("lossy: not the target" in text) is (not lossless)


def test_markdown_tables_keep_their_columns_whatever_the_cells_hold(results, save):
    results["figures"][0]["bound"] = "a | b\nc"
    markdown = (report.build(save(results)) / "report.md").read_text()
    outside = re.sub(r"^(`{3,}).*?^\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    tables = re.findall(r"(?:^\|.*\n)+", outside, flags=re.MULTILINE)
    assert len(tables) >= 10
    for table in tables:
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(columns) == 1, table


def test_markdown_fence_outlasts_backticks_in_the_sample(plotless, save):
    plotless["sample"]["pieces"] = [{"text": "x\n````\n\n\n# not a heading\n", "origin": "corrected"}]
    markdown = (report.build(save(plotless)) / "report.md").read_text()
    block = re.search(r"^(`{5,})\n(.*?)^\1$", markdown, flags=re.DOTALL | re.MULTILINE)
    assert block
    assert "⟦x\n````\n\n\n# not a heading\n⟧" in block[2]


@pytest.mark.parametrize("null", [False, True])
def test_parts_that_are_missing_are_said_not_to_be_measured(save, null):
    optional = ("command", "config_yaml", "machine", "figures", "training", "decoding", "sample", "stage_seconds")
    results = {
        "name": "bare",
        "date": "yesterday",
        "summary": {},
        **(dict.fromkeys(optional) if null else {}),
    }
    directory = report.build(save(results))
    html, parsed = page(directory)
    assert "svg" not in parsed.tags
    sections = html.split("<h2>")[1:]
    assert len(sections) == 7
    assert all("not measured" in body for body in sections)
    assert (directory / "report.md").read_text().count("not measured") >= 5
    assert not list(directory.glob("*.png"))


def test_cells_that_were_not_measured_leave_the_others_alone(results, save):
    results["training"] = {}
    for row in results["decoding"]:
        for name in ("predicted_speedup", "acceptance_at", "conditional_acceptance_at", "identical"):
            row.pop(name, None)
    _, parsed = page(report.build(save(results)))
    assert parsed.tags.count("svg") == 4 + 1  # speedup, lengths


def test_curves_that_are_not_finite_are_left_out(results, save):
    results["decoding"] = []
    for record in results["training"]["distill"]:
        record["loss"] = float("nan")
    _, parsed = page(report.build(save(results)))
    assert parsed.tags.count("svg") == 2


def test_missing_results_are_one_line_with_the_remedy(tmp_path):
    with pytest.raises(SpecjaxError, match=r"results\.json: not found.*finish the run") as error:
        report.build(tmp_path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "report").exists()


def test_text_that_is_not_json_is_named_with_its_line(tmp_path):
    (tmp_path / "results.json").write_text('{\n "name": demo}')
    with pytest.raises(SpecjaxError, match="line 2 is not JSON"):
        report.build(tmp_path)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: r.pop("summary"), "summary"),
        (lambda r: r["decoding"][3].update(batch_size="many"), r"decoding\.3\.batch_size.*'many'"),
        (lambda r: r["sample"]["pieces"][0].update(origin="guessed"), r"sample\.pieces\.0\.origin.*'guessed'"),
        (lambda r: r["figures"][0].pop("ok"), r"figures\.0\.ok"),
    ],
)
def test_malformed_results_name_the_field_and_the_value(results, save, change, field):
    change(results)
    run_dir = save(results)
    with pytest.raises(SpecjaxError, match=field) as error:
        report.build(run_dir)
    assert "\n" not in str(error.value)
    assert not (run_dir / "report").exists()


def test_results_that_are_no_object_are_refused(save):
    with pytest.raises(SpecjaxError, match="top level"):
        report.build(save([1, 2]))


def test_failed_write_keeps_the_old_report_and_no_temporary_file(plotless, save, monkeypatch):
    run_dir = save(plotless)
    directory = run_dir / "report"
    directory.mkdir()
    (directory / "report.html").write_text("the old one")

    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SpecjaxError, match="No space left on device"):
        report.build(run_dir)
    assert [path.name for path in directory.iterdir()] == ["report.html"]
    assert (directory / "report.html").read_text() == "the old one"


def test_same_results_give_the_same_page(results, save, built):
    assert (report.build(save(results)) / "report.html").read_bytes() == (built / "report.html").read_bytes()
