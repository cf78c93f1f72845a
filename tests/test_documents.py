"""Documents say what is true now: links lead somewhere, rendered parts are fresh, and a reader can follow every block."""

from __future__ import annotations

import json
import pkgutil
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import document_blocks, documents, notebooks

ROOT = documents.ROOT
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"```.*?```", re.DOTALL)
README_BYTES = 9_000
AGAIN = "run `make documents` and look at what it changed"


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in (a or b for a, b in LINK.findall(FENCED.sub("", page.read_text()))):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), (
                f"{page.name} links to {link}, and {target.name} has {sorted(anchors(target))}"
            )


def test_the_front_page_is_short_and_its_results_are_those_measured() -> None:
    text = documents.README.read_text()
    assert len(text.encode()) <= README_BYTES
    assert documents.with_results(text) == text, AGAIN


def test_commands_and_reference_are_those_of_the_code() -> None:
    assert (ROOT / "docs" / "commands.md").read_text() == documents.commands_page(), AGAIN
    assert (ROOT / "docs" / "reference.md").read_text() == documents.reference_page(), AGAIN


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, Any]]:
    """What came of following every document, in its order, in one process that begins in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:  # whose name is short enough for the titles of tables
        yield documents.followed(documents.RUN, Path(folder)) | {"folder": folder}


@pytest.mark.parametrize("document", documents.RUN, ids=lambda path: path.name)
def test_a_reader_can_follow(document: Path, answers: dict[str, Any]) -> None:
    answer = answers[str(document)]
    assert not answer["wrong"], "\n\n".join(answer["wrong"])
    assert not answer["stale"], AGAIN + ":\n" + "\n\n".join(answer["stale"])


def test_the_front_page_shows_the_plan_it_made(answers: dict[str, Any]) -> None:
    made = (Path(answers["folder"]) / "plan.svg").read_text()
    assert (documents.PICTURES / "plan.svg").read_text() == made, AGAIN


def test_a_block_that_fails_or_says_something_else_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- output -->\n```console\n$ shardwright --version\nshardwright 0.0.0\n```\n"
        "<!-- file two.py -->\n```python\nprint(1 + 1)\n```\n<!-- output -->\n```console\n$ python two.py\n2\n```\n"
        "```python\nassert 1 > 2, 'no'\n```\n```console\n$ shardwright plan nothing --cluster 8xH100\n$ rm -r /\n```\n"
    )
    answer = documents.followed((page,), tmp_path)[str(page)]
    assert [why.partition("\n")[0] for why in answer["wrong"]] == [
        "assert 1 > 2, 'no'", "$ shardwright plan nothing --cluster 8xH100",
    ]  # fmt: skip
    assert len(answer["stale"]) == 1
    assert "0.0.0" in answer["stale"][0]


@pytest.mark.parametrize("notebook", sorted(notebooks.NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_run_and_show_what_they_print(notebook: Path) -> None:
    stored, now = json.loads(notebook.read_text()), notebooks.run(notebook)
    for before, after in zip(stored["cells"], now["cells"], strict=True):
        words = [re.findall(r"[A-Za-z]{3,}", str(cell.get("outputs"))) for cell in (before, after)]
        assert words[0] == words[1], f"run `python -m bench.notebooks`: {before['outputs']} → {after['outputs']}"


BENCHMARK = re.compile(r"python3? (?:-m bench\.(\w+)|bench/(\w+)\.py)")
ASKED = re.compile(r"shardwright (\w+)([^`\n]*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_benchmarks_that_are_named_are_there(page: Path) -> None:
    for name in (a or b for a, b in BENCHMARK.findall(page.read_text())):
        assert (ROOT / "bench" / f"{name}.py").exists() or (ROOT / "bench" / name / "__main__.py").exists(), name


def test_the_page_for_researchers_asks_for_what_there_is() -> None:
    from shardwright.search.strategies import NAMES

    text = (ROOT / "docs" / "papers.md").read_text()
    sections = dict(part.split("\n", 1) for part in documents.commands_page().split("\n## ")[1:])
    for command, words in ASKED.findall(text):
        for option in re.findall(r"--[a-z-]+", words):
            assert option in sections[f"shardwright {command}"], f"shardwright {command} {option}"
    searches = re.search(r"--search all-row.*", text)[0] + re.search(r"--search data-parallel.*", text)[0]  # type: ignore[index]
    named = re.findall(r"[`\s]([a-z]+(?:-[a-z]+)*)`", searches) + re.findall(r"--search ([a-z-]+)", text)
    assert len(named) >= 9 and set(named) <= set(NAMES), set(named) - set(NAMES)
    for path in re.findall(r"`([\w/]+/(?:\w+\.py)?)`", text):
        assert any((base / path).exists() for base in (ROOT, ROOT / "src" / "shardwright")), path


FIVE = ("An operator", "A device preset", "A recipe", "A schedule", "A calibration case")


def test_what_contributors_add_is_one_edit_each_and_works(tmp_path: Path) -> None:
    page = documents.CONTRIBUTING
    sections = dict(part.split("\n", 1) for part in page.read_text().split("\n## ")[1:])
    for name in FIVE:
        edits = [block for block in document_blocks.blocks(sections[name]) if block.edit]
        commands = [block for block in document_blocks.blocks(sections[name]) if block.language == "console"]
        assert len(edits) == 1 and commands, name
    answer = documents.contributed(page, tmp_path)[str(page)]
    assert not answer["wrong"], "\n\n".join(answer["wrong"])
    assert not answer["stale"], AGAIN + ":\n" + "\n\n".join(answer["stale"])


TERM = re.compile(r"^\*\*([^*]+)\*\*(?: \(`([\w.]+)`\))?: ", re.MULTILINE)


def test_every_word_of_the_glossary_stands_in_the_code() -> None:
    terms = TERM.findall((ROOT / "docs" / "glossary.md").read_text())
    assert [term.lower() for term, _ in terms] == sorted(term.lower() for term, _ in terms)
    assert len(terms) > 30
    for term, path in terms:
        if path:
            assert pkgutil.resolve_name(path) is not None, term
