"""What a backward needs of its forward: kept, or computed again of what is there in any case."""

import torch
from torch import nn

from kernelwright.fuser.joint_recording import Call, record_joint
from kernelwright.fuser.partition import part


class Joined(nn.Module):
    """As FLUX's single blocks: text and image as one sequence, whose norm reads it again."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, text, image):
        whole = torch.cat([text, image], 1)
        return whole + self.up(self.norm(whole))


def parted(module, *given):
    call, tensors = Call.of(module, given, {})
    result = module(*given)
    return part(record_joint(module, call, tensors, [torch.randn_like(result)]))


def made(found):
    """The ops whose results the forward keeps."""
    (output,) = found.forward.graph.find_nodes(op="output")
    return [str(n.target) for n in output.args[0][len(found.results) :]]


def test_what_inputs_tell_is_not_kept_beside_them():
    module = Joined()
    module.up.requires_grad_(False)  # the statistics of the norm are kept, not its rows
    given = [torch.randn(2, tokens, 16, requires_grad=True) for tokens in (3, 5)]
    found = parted(module, *given)
    assert made(found)
    assert not any("cat" in op for op in made(found))
    names = [n.name for n in found.forward.graph.find_nodes(op="placeholder")]
    assert {len(names) - 2, len(names) - 1} <= set(found.given)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.up(self.norm(x))


def ops(graph):
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def test_rows_of_a_norm_are_made_again_and_not_kept():
    found = parted(Normed(), torch.randn(2, 5, 16, requires_grad=True))
    assert "aten.native_layer_norm.default" in ops(found.backward.graph)
    (output,) = found.forward.graph.find_nodes(op="output")
    kept = output.args[0][len(found.results) :]
    assert not [n for n in kept if n.meta["val"].shape[-1] == 16]


def test_a_norm_whose_statistics_alone_are_needed_does_not_run_again():
    module = Normed()
    module.up.requires_grad_(False)
    found = parted(module, torch.randn(2, 5, 16, requires_grad=True))
    assert "aten.native_layer_norm.default" not in ops(found.backward.graph)
    assert found.made == 2
