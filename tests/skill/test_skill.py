"""The agent skill: valid, complete, true to the package, and installed where agents look."""

import json
import re
from pathlib import Path

import pytest
import yaml
from skill_figures import SECTIONS, marks
from typer.testing import CliRunner

from kernelwright import skill
from kernelwright.cli import app
from kernelwright.ops.op import registry

PAGES = [skill.FOLDER / f for f in skill.files() if f.suffix == ".md"]
REFERENCES = {
    "kernel-templates",
    "add-triton-kernel",
    "add-cuda-kernel",
    "use-efficient-kernels",
    "benchmark-and-profile",
    "nsight-profiler",
    "h100-optimization-guide",
    "a100-optimization-guide",
    "t4-optimization-guide",
    "diffusers-integration",
    "transformers-integration",
    "huggingface-kernels-integration",
    "troubleshooting",
}
TEMPLATES = skill.FOLDER.parent / "scaffold" / "templates"
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")


def invoke(*args):
    return CliRunner().invoke(app, ["skill", *map(str, args)], env={"COLUMNS": "200"})


def front_matter():
    text = (skill.FOLDER / "SKILL.md").read_text()
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


def by_name(page):
    return page.stem


def test_the_front_matter_is_what_agents_read():
    """The limits are those of the Agent Skills specification."""
    head = front_matter()
    assert head["name"] == skill.NAME
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", head["name"])
    assert len(head["name"]) <= 64
    assert 1 <= len(head["description"]) <= 1024
    assert 1 <= len(head["compatibility"]) <= 500
    assert head["disable-model-invocation"] is False
    assert head["user-invocable"] is True
    assert head["allowed-tools"].split() == ["Read", "Grep", "Glob", "Bash"]
    known = {"name", "description", "license", "compatibility", "allowed-tools"}
    known |= {"disable-model-invocation", "user-invocable", "argument-hint"}
    assert set(head) <= known
    assert all(isinstance(value, str | bool) for value in head.values())


def test_it_is_short_enough_to_be_loaded_whole():
    assert len((skill.FOLDER / "SKILL.md").read_text().splitlines()) < 500


def test_it_has_every_reference_and_names_each_of_its_files():
    assert {p.stem for p in PAGES} == {"SKILL", *REFERENCES}
    text = "\n".join(p.read_text() for p in PAGES)
    first = (skill.FOLDER / "SKILL.md").read_text()
    for file in skill.files()[1:]:
        assert f"({file})" in first if file.suffix == ".md" else file.name in text, file


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_and_named_files_are_there(page):
    text = page.read_text()
    in_words = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for link in LINK.findall(in_words):
        assert not link.startswith("/")
        assert (page.parent / link).is_file(), link
    for script in re.findall(r"scripts/(\w+\.py)", text):
        assert (skill.FOLDER / "scripts" / script).is_file(), script
    package = skill.FOLDER.parent
    for named in re.findall(r"`((?:ops|backends|inject|recipes)/[\w/]+\.(?:py|cuh))`", text):
        places = (package / named, package / "inject" / named)
        assert any(p.is_file() for p in places), named


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_options_named_in_the_text_exist(page):
    """Commands in fences are run elsewhere; these are the ones in running text."""
    for command in re.findall(r"`kernelwright ([a-z][^`]*)`", page.read_text().replace("\n", " ")):
        words = command.split()
        group = words[:2] if words[0] in ("bench", "hub", "skill") else words[:1]
        group = words[:3] if group == ["skill", "eval"] else group
        shown = CliRunner().invoke(app, [*group, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, command
        for option in (w for w in words if w.startswith("--")):
            assert option in shown.output, command


def test_ops_named_in_its_table_exist():
    text = (skill.FOLDER / "references" / "use-efficient-kernels.md").read_text()
    table = text.partition("| the model does | op |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert len(named) > 15
    assert named <= set(registry())


def test_what_is_said_of_the_templates_is_in_them():
    """The line that computes, as quoted in the pages."""
    pages = {p.stem: p.read_text() for p in PAGES}
    line = "b_y = b_x * tl.sigmoid(beta * b_x)"
    assert line in pages["add-triton-kernel"]
    assert line in (TEMPLATES / "elementwise" / "triton.py.txt").read_text()
    assert "`6q3If`" in pages["add-cuda-kernel"]
    assert 'layout="6q3If"' in (TEMPLATES / "elementwise" / "cuda.py.txt").read_text()


@pytest.mark.parametrize(("page", "name", "make"), SECTIONS, ids=lambda v: getattr(v, "stem", None))
def test_figures_are_those_of_the_results(page, name, make):
    begin, end = marks(name)
    shown = page.read_text().partition(begin)[2].partition(end)[0]
    assert shown == f"{make()}\n", "run: python tests/skill/skill_figures.py"


# kernelwright skill


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty project and an empty home."""
    home = tmp_path / "home"
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


def held(place: Path):
    return {p.relative_to(place) for p in place.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("options", "place"),
    [
        (["--claude"], "project/.claude/skills"),
        (["--codex"], "project/.agents/skills"),
        (["--opencode"], "project/.opencode/skills"),
        ([], "project/.agents/skills"),
        (["--claude", "--global"], "home/.claude/skills"),
        (["--codex", "-g"], "home/.agents/skills"),
        (["--opencode", "--global"], "home/.config/opencode/skills"),
        (["--dest", "elsewhere/skills"], "project/elsewhere/skills"),
    ],
)
def test_add_puts_the_whole_skill_where_the_agent_looks(project, options, place):
    done = invoke("add", *options)
    assert done.exit_code == 0, done.output
    put = project / place / "cuda-kernels"
    assert held(put) == set(skill.files())
    assert (put / "SKILL.md").read_bytes() == (skill.FOLDER / "SKILL.md").read_bytes()
    assert str(Path(place).relative_to(Path(place).parts[0]) / "cuda-kernels") in done.output
    assert [p.name for p in put.parent.iterdir()] == ["cuda-kernels"]


def test_add_serves_several_agents_at_once(project):
    done = invoke("add", "--claude", "--opencode", "--json")
    assert json.loads(done.output) == [
        ".claude/skills/cuda-kernels",
        ".opencode/skills/cuda-kernels",
    ]


def test_add_overwrites_nothing_unless_forced(project):
    invoke("add", "--claude")
    put = Path(".claude/skills/cuda-kernels")
    changed = put / "SKILL.md"
    changed.write_text(changed.read_text() + "mine\n")
    (put / "references" / "old.md").touch()
    refused = invoke("add", "--claude")
    assert refused.exit_code == 1
    assert "--force replaces it" in refused.output
    assert changed.read_text().endswith("mine\n")
    assert invoke("add", "--claude", "--force").exit_code == 0
    assert held(put) == set(skill.files())
    assert not changed.read_text().endswith("mine\n")


def test_add_never_replaces_what_is_another_thing(project):
    other = Path(".claude/skills/cuda-kernels")
    other.mkdir(parents=True)
    (other / "SKILL.md").write_text("---\nname: mine\n---\n")
    refused = invoke("add", "--claude", "--force")
    assert refused.exit_code == 1
    assert "is not this skill" in refused.output
    assert (other / "SKILL.md").read_text() == "---\nname: mine\n---\n"


def test_add_says_in_one_line_what_cannot_be_written(project):
    Path("file").touch()
    done = invoke("add", "--dest", "file")
    assert done.exit_code == 1
    assert done.output.count("\n") == 1
    assert "file cannot be written" in done.output


def test_list_shows_the_files_and_the_copies(project):
    assert "no agent finds a copy" in invoke("list").output
    invoke("add", "--claude")
    invoke("add", "--opencode", "--global")
    Path(".claude/skills/cuda-kernels/references/troubleshooting.md").unlink()
    found = json.loads(invoke("list", "--json").output)
    assert found["files"]["references/add-cuda-kernel.md"] == "Add a CUDA C++ kernel"
    assert set(found["files"]) == {str(f) for f in skill.files()}
    states = {copy["agent"]: copy["state"] for copy in found["copies"]}
    assert states == {"claude": "other", "opencode": "same"}
    assert "another edition" in invoke("list").output


def test_path_is_the_folder_of_the_package(project):
    folder = Path(invoke("path").output.strip())
    assert (folder / "SKILL.md").is_file()
    assert folder == skill.FOLDER
