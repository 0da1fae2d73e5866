"""Blocks of one's own whose forward does more than compute a tensor of its inputs: they have
eager's results at every call, whether they are recorded or run as they did."""

import copy
import dataclasses
import gc
import itertools
import random
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kernelwright as kw

WIDTH = 32


class Block(nn.Module):
    """Enough ops to be worth recording, around a step that is each test's own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.set_up()

    def set_up(self):
        pass

    def step(self, x):
        return x * 2

    def forward(self, x, **given):
        x = x + self.down(F.gelu(self.up(self.norm(x) * 1.5 + 0.1)))
        return self.step(self.norm(x) * 3 - 1, **given) * 0.5 + x


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x, control=None, **given):
        for block in self.blocks:
            x = block(x, **given)
            if control is not None:
                x += control
        return x


def pair(kind=Block, model=Model, numerics="exact"):
    torch.manual_seed(0)
    eager = model(kind).eval().requires_grad_(False)
    ours = copy.deepcopy(eager)
    kw.inject(ours, numerics=numerics)
    return eager, ours


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def x_of(seed=0):
    return drawn(2, 7, WIDTH, seed=seed)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@dataclasses.dataclass
class Output:
    y: torch.Tensor


class ReturnsAnObject(Block):
    def forward(self, x):
        return Output(super().forward(x))


class ReadsAnObject(Model):
    def forward(self, x):
        for block in self.blocks:
            x = block(x).y
        return x


def test_an_object_is_returned():
    eager, ours = pair(ReturnsAnObject, ReadsAnObject)
    for seed in range(3):
        assert torch.equal(ours(x_of(seed)), eager(x_of(seed)))


@pytest.mark.parametrize("numerics", ["exact", "fused"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_block_returns_is_written_to_before_the_next_one(mode, numerics):
    eager, ours = pair(numerics=numerics)
    control = x_of(1)
    with mode():
        for given in (None, None, None, control):
            expected = eager(x_of(), given)
            torch.testing.assert_close(ours(x_of(), given), expected, rtol=1e-4, atol=1e-5)
            assert numerics == "fused" or torch.equal(ours(x_of(), given), expected)


class FillsAList(Block):
    def step(self, x, features):
        features += [x]
        return x * 2


def test_a_list_is_filled():
    eager, ours = pair(FillsAList)
    for seed in range(3):
        expected, found = [], []
        eager(x_of(seed), features=expected)
        ours(x_of(seed), features=found)
        assert len(found) == len(expected) == 3
        assert all(map(torch.equal, found, expected))


class Attends(Block):
    def set_up(self):
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = torch.linspace(1, 2, WIDTH)

    def step(self, x, text):
        x, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2)
            for t in (x, self.key(text * self.table), self.value(text))
        )
        return F.scaled_dot_product_attention(x, k, v).transpose(1, 2).flatten(2)


def test_a_tensor_that_is_no_buffer_is_written_to():
    eager, ours = pair(Attends)
    text = drawn(2, 5, WIDTH, seed=2)
    for _ in range(4):
        assert torch.equal(ours(x_of(), text=text), eager(x_of(), text=text))
    for model in (eager, ours):
        for block in model.blocks:
            block.table.mul_(1.5)
    assert torch.equal(ours(x_of(), text=text), eager(x_of(), text=text))


class AsksWhetherInputsAreOne(Block):
    def step(self, x, a, b):
        return x * (2 if a is b else 3) + a


@pytest.mark.parametrize("numerics", ["exact", "fused"])
def test_two_inputs_are_one_tensor(numerics):
    eager, ours = pair(AsksWhetherInputsAreOne, numerics=numerics)
    a, other = x_of(3), x_of(3)
    for b in (other, other, other, a, a, other):
        found, expected = ours(x_of(), a=a, b=b), eager(x_of(), a=a, b=b)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert numerics == "fused" or torch.equal(found, expected)


def test_two_inputs_are_one_tensor_in_training():
    eager, ours = pair(AsksWhetherInputsAreOne)
    a, other = x_of(3), x_of(3)
    with torch.enable_grad():
        for b in (other, other, a, a, other):
            x, y = (x_of().requires_grad_() for _ in range(2))
            found, expected = ours(x, a=a, b=b), eager(y, a=a, b=b)
            assert torch.equal(found, expected)
            found.sum().backward()
            expected.sum().backward()
            assert torch.equal(x.grad, y.grad)


class Iterates(Block):
    def set_up(self):
        self.steps = itertools.cycle([1.0, 2.0, 3.0])

    def step(self, x):
        return x * next(self.steps)


class Draws(Block):
    def step(self, x):
        return x * (2 if random.random() < 0.5 else 1)


class DrawsWithNumPy(Block):
    def step(self, x):
        return x * float(np.random.rand())


class ImportsWhatDraws(Block):
    def step(self, x):
        from random import uniform

        return x * uniform(1, 2)


class OwnGenerator(Block):
    def set_up(self):
        self.generator = torch.Generator().manual_seed(0)

    def step(self, x):
        return x + torch.randn(x.shape, generator=self.generator)


class WritesToAnArray(Block):
    def set_up(self):
        self.total = np.zeros(1)

    def step(self, x):
        total = self.total
        total += 1
        return x * float(total[0])


class WritesToATensor(Block):
    def set_up(self):
        self.total = torch.zeros(WIDTH)

    def step(self, x):
        total = self.total
        total += 1
        return x * total


@pytest.mark.parametrize(
    "kind",
    [
        *(Iterates, Draws, DrawsWithNumPy, ImportsWhatDraws, OwnGenerator),
        *(WritesToAnArray, WritesToATensor),
    ],
)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_forward_that_differs_from_call_to_call(kind, gradients):
    eager, ours = pair(kind)
    with torch.set_grad_enabled(gradients):
        for seed in range(5):
            found = []
            for model in (eager, ours):
                random.seed(seed)
                np.random.seed(seed)
                found.append(model(x_of(seed).requires_grad_(gradients)))
            assert torch.equal(*found)


class Asserts(Block):
    def step(self, x, t):
        torch._assert_async((t >= 0).all())
        return x * 2 + t.sum()


def test_what_is_asserted_of_values_is_asserted_at_every_call():
    eager, ours = pair(Asserts)
    for _ in range(3):
        assert torch.equal(ours(x_of(), t=torch.ones(3)), eager(x_of(), t=torch.ones(3)))
    with pytest.raises(RuntimeError):
        ours(x_of(), t=-torch.ones(3))


class ReadsTables(Block):
    OPTIONS = {"scale": 1.0}  # noqa: RUF012

    def set_up(self):
        self.tables = {"angles": torch.linspace(1, 2, WIDTH)}
        self.options = {"attention": {"scale": 1.0}}

    def step(self, x):
        scale = self.options["attention"]["scale"] * self.OPTIONS["scale"]
        return x * self.tables["angles"] * scale


@pytest.mark.parametrize("gradients", [False, True])
def test_what_stands_in_containers_is_replaced(gradients, monkeypatch):
    eager, ours = pair(ReadsTables)
    blocks = [*eager.blocks, *ours.blocks]

    def same():
        x = x_of().requires_grad_(gradients)
        with torch.set_grad_enabled(gradients):
            assert torch.equal(ours(x), eager(x))

    for _ in range(4):
        same()
    for block in blocks:
        block.tables["angles"] = torch.linspace(2, 3, WIDTH)
    same()
    for block in blocks:
        block.options["attention"]["scale"] = 2.0
    same()
    monkeypatch.setitem(ReadsTables.OPTIONS, "scale", 3.0)
    same()


class KnowsItsModel(Model):
    def __init__(self, kind):
        super().__init__(kind)
        for block in self.blocks:
            block.__dict__["model"] = self


def test_a_model_that_its_blocks_know_is_freed():
    model = KnowsItsModel(Block).eval()
    kw.inject(model)
    model(x_of())
    model(x_of())
    kw.restore(model)
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None
