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
    given = [torch.randn(2, tokens, 16, requires_grad=True) for tokens in (3, 5)]
    found = parted(Joined(), *given)
    assert made(found)
    assert not any("cat" in op for op in made(found))
    names = [n.name for n in found.forward.graph.find_nodes(op="placeholder")]
    assert {len(names) - 2, len(names) - 1} <= set(found.given)
