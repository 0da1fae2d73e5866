"""Weights are read from safetensors; from pickles only on request, and then only tensors."""

import pickle

import pytest
import torch

from kernelwright import models

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

# a preset of each library, and the library's file name for pickled weights
LIBRARIES = {"dit-xl": "diffusion_pytorch_model.bin", "llama-3-8b": "pytorch_model.bin"}


class Runs:
    """A pickle that runs code when loaded: here it creates a folder."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        import os

        return os.mkdir, (self.mark,)


def pickle_weights(folder, name):
    """Replace the safetensors of a saved model by a pickle."""
    (kept,) = folder.glob("*.safetensors")
    torch.save(safetensors.load_file(kept), folder / name)
    kept.unlink()


@pytest.fixture(params=LIBRARIES)
def pickled(request, tmp_path):
    """A model, and the folder with its pickled weights."""
    built = models.build(request.param, tiny=True)
    built.save_pretrained(tmp_path)
    pickle_weights(tmp_path, LIBRARIES[request.param])
    return built, tmp_path, tmp_path / LIBRARIES[request.param]


def test_a_pickle_is_not_read_unasked(pickled):
    built, folder, _ = pickled
    with pytest.raises(ValueError, match=r"read from safetensors.*load\(\.\.\., allow_pickle=True"):
        models.load(folder)
    loaded = models.load(folder, allow_pickle=True)
    for path, weight in built.state_dict().items():
        assert torch.equal(loaded.state_dict()[path], weight), path


def test_safetensors_are_taken_even_if_a_pickle_is_allowed(pickled, tmp_path_factory):
    built, folder, file = pickled
    built.save_pretrained(folder)
    mark = tmp_path_factory.mktemp("marks") / "ran"
    file.write_bytes(pickle.dumps(Runs(mark)))
    models.load(folder)
    models.load(folder, allow_pickle=True)
    assert not mark.exists()


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("save", [torch.save, lambda what, at: at.write_bytes(pickle.dumps(what))])
def test_a_pickle_runs_nothing_asked_for_or_not(pickled, tmp_path_factory, save, allowed):
    _, folder, file = pickled
    mark = tmp_path_factory.mktemp("marks") / "ran"
    save(Runs(mark), file)
    with pytest.raises((ValueError, OSError, pickle.UnpicklingError)):
        models.load(folder, allow_pickle=allowed)
    assert not mark.exists()
    with file.open("rb") as there:  # it exists only if the pickle was executed
        if there.read(2) != b"PK":
            pickle.loads(file.read_bytes())
            assert mark.exists()


@pytest.mark.parametrize(
    ("part", "name"),
    [("transformer", "diffusion_pytorch_model.bin"), ("text_encoder", "pytorch_model.bin")],
)
def test_a_pickle_in_a_part_of_a_pipeline_is_not_read_unasked(tmp_path, part, name):
    pipe = models.ltx_pipeline(tiny=True)
    pipe.save_pretrained(tmp_path)
    assert type(models.load(tmp_path)) is type(pipe)
    pickle_weights(tmp_path / part, name)
    with pytest.raises(ValueError, match="allow_pickle=True"):
        models.load(tmp_path)
    loaded = getattr(models.load(tmp_path, allow_pickle=True), part).state_dict()
    for path, weight in getattr(pipe, part).state_dict().items():
        assert torch.equal(loaded[path], weight), path
