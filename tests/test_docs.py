"""The documentation against the code: op tables, thresholds, README examples, links."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import flaop
from flaop import _bindings
from flaop.doctor import registered

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])


def read(name):
    return (ROOT / name).read_text()


def rows(text, columns):
    """Rows of the tables with so many columns, as lists of cells, separators left out."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == columns and not set(cells[0]) <= set("-: "):
            yield cells


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def squeeze(text):
    return " ".join(text.split())


def test_every_op_has_a_row_and_the_kernels_it_names():
    table = {}
    for op, _, fake, cpu, cuda, gradient in rows(read("docs/ops.md"), 6):
        table[op.strip("`")] = (fake, cpu, cuda, gradient)
    del table["op"]
    found = registered()
    assert set(table) == set(found)
    for name, has in found.items():
        fake, cpu, cuda, gradient = table[name]
        assert has["composite"] == (fake == "-"), name
        if has["composite"]:
            continue
        kernels = (has["fake"], has["CPU"], has["CUDA"])
        assert (fake, cpu, cuda) == tuple("yes" if k else "no" for k in kernels), name
        assert has["Autograd"] and gradient in ("yes", "refuses"), name


def documented_schemas():
    """Schemas with the abbreviations written out: a block that follows "`NAME`" defines NAME."""
    text = read("docs/ops.md")
    named = re.findall(r"^`([A-Z_]+)`[^\n]*:\n\n```text\n(.*?)^```$", text, flags=re.M | re.S)
    abbreviations = {name: squeeze(block) for name, block in named}
    ops = " ".join(squeeze(b) for b in blocks(text, "text") if b.startswith("flaop::"))
    for _ in range(2):  # an abbreviation may hold another
        ops = re.sub(r"\b[A-Z_]{2,}\b", lambda m: abbreviations.get(m[0], m[0]), ops)
    return [f"flaop::{schema.strip()}" for schema in ops.split("flaop::")[1:]]


def test_schemas_in_the_docs_are_the_registered_ones():
    actual = {str(getattr(torch.ops.flaop, n.split("::")[1]).default._schema) for n in registered()}
    assert set(documented_schemas()) == actual


def test_every_public_function_is_in_the_readme():
    tools = ("explain", "supports", "backend", "warmup")
    functions = {n for n in flaop.__all__ if inspect.isfunction(getattr(flaop, n))} - {*tools}
    table = {cells[0].strip("`") for cells in rows(read("README.md"), 3)}
    assert {f"flaop.{n}" for n in functions} <= table
    for name in tools:
        assert f"flaop.{name}" in read("README.md"), name


def test_thresholds():
    table = dict(rows(read("docs/dispatch.md"), 2))
    names = [name for name in dir(_bindings) if name.endswith("_TOKENS")]
    assert names
    for name in names:
        assert table[f"`{name}`"] == str(getattr(_bindings, name)), name
    short, packed = _bindings.SHORT_TOKENS, _bindings.SHORT_PACKED_TOKENS
    sentence = (
        f"T <= {short}; with packed sequences T <= {short}, or T <= {short} N and T <= {packed}"
    )
    assert sentence in read("README.md")


def test_needs_of_the_dispatch_table():
    text = read("docs/dispatch.md")
    header, *body = list(rows(text, 5))
    paths = header[2:]
    assert paths == list(_bindings.paths())
    assert [cells[0].strip("`") for cells in body] == list(_bindings.features())
    for need, _, *offers in body:
        for path, offer in zip(paths, offers, strict=True):
            chosen, _ = _bindings.decide(f"auto:{path}", [need.strip("`")])
            offered = _bindings.FLASH_KDA_BUILT if offer == "if built" else offer == "yes"
            assert (chosen == path) == offered or not _bindings.FLASH_KDA_BUILT, (need, path)


def test_paths_table_of_readme_and_dispatch():
    for name, columns in (("README.md", 2), ("docs/dispatch.md", 3)):
        found = [cells[0].strip("`") for cells in rows(read(name), columns)]
        start = found.index("path") + 1
        assert found[start : start + 3] == list(_bindings.paths()), name


@pytest.mark.parametrize("number", range(len(blocks(read("README.md"), "python"))))
def test_readme_example_runs(number, capsys):
    torch.manual_seed(0)
    exec(compile(blocks(read("README.md"), "python")[number], "README.md", "exec"), {})
    if number == 0:
        assert "fused_recurrent" in capsys.readouterr().out


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_measured_numbers_name_their_commit():
    """A section with a figure in milliseconds or a ratio says where it was measured."""
    for section in read("docs/measured.md").split("\n## ")[1:]:
        if re.search(r"\d\s*(ms|us|MiB|x\b)", section):
            assert re.search(r"commit `?[0-9a-f]{7,40}", section), section.splitlines()[0]
            assert re.search(r"\b20\d\d-\d\d-\d\d\b", section), section.splitlines()[0]
