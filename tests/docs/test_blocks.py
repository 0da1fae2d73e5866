"""Every code block of the documentation runs, and a broken one is detected."""

import html
import re

import pytest
import torch
from blocks import Block, Wrong, blocks, documents
from links import FENCED
from running import is_quoted, run

HERE = [block for path in documents() for block in blocks(path) if not block.gpu]


@pytest.mark.parametrize("block", HERE, ids=lambda block: block.name)
def test_a_block_runs(block, tmp_path):
    before = torch.random.get_rng_state()
    run(block, tmp_path)
    torch.random.set_rng_state(before)


def page(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text)
    return list(blocks(path))


def test_blocks_are_found_with_their_lines_and_marks(tmp_path):
    text = (
        "a\n\n```python\nx = 1\n```\n\n- b\n\n    ```bash\n    make test\n    ```\n\n<!-- gpu -->\n"
    )
    first, second, third = page(tmp_path, text + "~~~bash\nmake\n~~~\n")
    assert (first.line, first.language, first.text, first.gpu) == (3, "python", "x = 1", False)
    assert (second.line, second.language, second.text) == (9, "bash", "make test")
    assert third.gpu


def test_a_block_without_an_end_is_refused(tmp_path):
    with pytest.raises(Wrong, match="no end"):
        page(tmp_path, "```python\nx = 1\n")


WRONG = {
    "kernelwright opps": "No such command",
    "kernelwright ops --jsn": "No such option",
    "kernelwright inspect no-such-model": "no-such-model",
    "pip install -e '.[cuda,modells]'": "extra 'modells'",
    "pip install torhc": "dependency 'torhc'",
    "pip install ./nowhere": "no package",
    "pip install 'kernelwright[modells] @ git+https://example.com/k'": "extra 'modells'",
    "pip install 'kernelwright @ example.com/k'": "no address",
    "make tset": "target 'tset'",
    "git cloen here": "git command 'cloen'",
    "python examples/none.py": "no examples/none.py",
    "python -m pytest tests/none": "no tests/none",
    "kernels bench here": "invalid choice",
    "kernelwright ops | head": "plain commands",
    "curl here": "no command that is checked",
}


@pytest.mark.parametrize("command", WRONG)
def test_a_command_that_is_not_there_is_found(command, tmp_path):
    with pytest.raises(Wrong, match=WRONG[command]):
        run(Block(tmp_path / "page.md", 1, "bash", command, False), tmp_path)


def test_python_that_fails_is_found(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(Block(tmp_path / "page.md", 1, "python", "1 / 0", False), tmp_path)


@pytest.mark.parametrize("line", ["kernelwright ops", "$ make test", "import torch"])
def test_what_could_be_run_is_no_text(line, tmp_path):
    run(Block(tmp_path / "page.md", 1, "text", "2 graphs", False), tmp_path)
    with pytest.raises(Wrong, match="stand in a bash block"):
        run(Block(tmp_path / "page.md", 1, "text", line, False), tmp_path)


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_code_outside_of_a_fence_is_quoted_from_a_kernel(path):
    """Indented code is rendered as a block, too, but not run."""
    markdown = pytest.importorskip("markdown")
    shown = markdown.markdown(FENCED.sub("", path.read_text(encoding="utf-8")))
    indented = re.findall(r"<pre><code>(.*?)</code></pre>", shown, re.DOTALL)
    assert [code for code in map(html.unescape, indented) if not is_quoted(code)] == []


def test_a_language_that_nothing_runs_is_refused(tmp_path):
    with pytest.raises(Wrong, match="language 'ruby'"):
        run(Block(tmp_path / "page.md", 1, "ruby", "puts 1", False), tmp_path)


def test_cuda_that_the_library_does_not_have_is_found(tmp_path):
    real = "struct Once {\n"
    run(Block(tmp_path / "page.md", 1, "cuda", real, False), tmp_path)
    with pytest.raises(Wrong, match="no kernel of the library"):
        run(Block(tmp_path / "page.md", 1, "cuda", "struct Never {", False), tmp_path)


def test_a_block_sees_nothing_of_another(tmp_path):
    run(Block(tmp_path / "page.md", 1, "python", "left_over = 1", False), tmp_path)
    with pytest.raises(NameError):
        run(Block(tmp_path / "page.md", 9, "python", "print(left_over)", False), tmp_path)
