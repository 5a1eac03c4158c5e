"""ZeroOptimizer with one copy of the parameters for all data ranks, and the memory that holds it."""

from __future__ import annotations

import copy
import gc
import os
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine import Layout
from engine.zero import ZeroOptimizer
from tests.test_zero_memory import SIDE, big_model, train
from tests.world import World, refusals

SHARED = os.environ.get("ENGINE_TRANSPORT", "shm") == "shm"
shared_memory = pytest.mark.skipif(not SHARED, reason="about memory that ranks share")


# ---- allocate ------------------------------------------------------------------------------------------------------


def one_for_all(mesh: engine.Mesh) -> Any:
    comm, taken = mesh.world, mesh.memory()["world"]["allocated"]
    x = comm.allocate((comm.size, 70000), torch.float64, shared=True)
    zero = bool((x == 0).all())
    comm.barrier()
    x[comm.rank].fill_(comm.rank + 1.0)
    comm.barrier()
    sums = x.sum(dim=1).tolist()
    held = mesh.memory()["world"]["allocated"] - taken
    comm.barrier()
    del x
    gc.collect()
    own = comm.allocate((5,))
    own += comm.rank
    return zero, sums, held, mesh.memory()["world"]["allocated"] - taken, own.tolist()


@shared_memory
@pytest.mark.parametrize("ranks", [2, 4])
def test_shared_memory_is_one_tensor_of_all_ranks_and_goes_back(world: World, ranks: int) -> None:
    for rank, (zero, sums, held, left, own) in enumerate(world.run(Layout(data=ranks), one_for_all)):
        assert zero
        assert sums == [70000.0 * (j + 1) for j in range(ranks)]
        assert held == (ranks * 70000 * 8 if rank == 0 else 0)  # rank 0 has reserved it, for all
        assert left == 5 * 4
        assert own == [float(rank)] * 5  # ordinary memory of `allocate` is still each rank's own


def apart(mesh: engine.Mesh) -> str:
    try:
        mesh.world.allocate((8,), torch.float32, shared=mesh.rank == 0)
    except engine.EngineError as error:
        return str(error)
    return "no error"


@shared_memory
def test_ranks_that_want_different_kinds_of_memory_are_told_so(world: World) -> None:
    for text in world.run(Layout(data=2), apart):
        assert "allocate of 32 shared bytes" in text
        assert "allocate of 32 bytes" in text


def alone(mesh: engine.Mesh) -> list[float]:
    return mesh.data.allocate((2,), shared=True).tolist()


def test_a_group_of_one_shares_with_nobody(world: World) -> None:
    assert world.run(Layout(), alone) == [[0.0, 0.0]]


# ---- training ------------------------------------------------------------------------------------------------------


def trained(mesh: engine.Mesh, share: bool) -> Any:
    model = big_model()
    with torch.no_grad():
        model[0].weight.add_(mesh.rank)  # rank 0's values count
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh, share_parameters=share, lr=1e-2)
    train(mesh, model, optimizer, 2)
    average = copy.deepcopy(model)
    before = engine.full_state_dict(model, mesh)
    train(mesh, model, optimizer, 2)
    with torch.no_grad():
        for mean, now in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(now, 0.5)
    train(mesh, model, optimizer, 1)
    after = engine.full_state_dict(model, mesh)
    others = {name: value + mesh.rank for name, value in before.items()}  # of several ranks' values rank 0's count
    engine.load_full_state_dict(model, mesh, others, optimizer)
    loaded = engine.full_state_dict(model, mesh)
    train(mesh, model, optimizer, 1)
    last = engine.full_state_dict(model, mesh)
    allocated = mesh.memory().get("data", {}).get("allocated", 0)
    return before, after, loaded, last, dict(average.state_dict()), allocated


@shared_memory
@pytest.mark.parametrize("ranks", [2, 4])
def test_shared_parameters_change_no_bit_of_training_copies_and_loading(world: World, ranks: int) -> None:
    wanted = world.run(Layout(data=ranks), trained, False)[0]
    found = world.run(Layout(data=ranks), trained, True)
    for rank, each in enumerate(found):
        for states, right in zip(each[:5], wanted[:5], strict=True):
            assert all(torch.equal(states[name], right[name]) for name in right)
        assert all(torch.equal(each[2][name], each[0][name]) for name in each[0])
        nbytes = 2 * (SIDE * SIDE + SIDE) * 4
        assert each[5] == (2 * nbytes if rank == 0 else nbytes)  # gradients everywhere, parameters once


def changed(mesh: engine.Mesh) -> list[str]:
    texts = []
    for case in ("one", "all"):
        model = big_model()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, share_parameters=True, lr=1e-2)
        train(mesh, model, optimizer, 1)
        with torch.no_grad():
            if case == "all" or (case == "one" and mesh.rank == 1):
                model[2].bias.mul_(1.0)
        texts += refusals([lambda model=model, optimizer=optimizer: train(mesh, model, optimizer, 1)])
    # As the error says: drop the step, load, go on. The last optimizer is the one that refused.
    state = {name: value + mesh.rank for name, value in engine.full_state_dict(model, mesh).items()}
    texts += refusals([lambda: engine.load_full_state_dict(model, mesh, state, optimizer=optimizer)])
    optimizer.zero_grad()
    engine.load_full_state_dict(model, mesh, state, optimizer=optimizer)
    train(mesh, model, optimizer, 1)
    return texts


@shared_memory
def test_a_shared_parameter_that_was_changed_in_place_is_an_error_on_every_rank(world: World) -> None:
    first, second = world.run(Layout(data=2), changed)
    assert "changed in place or moved on another rank" in first[0]
    assert "'2.bias' was changed in place between steps" in second[0]
    for texts in (first, second):
        assert "'2.bias' was changed in place between steps" in texts[1]
        assert "optimizer.zero_grad() to drop this step, then load values with engine.load_full_state" in texts[1]
        assert "step first, or drop them with optimizer.zero_grad()" in texts[2]


def left_out(mesh: engine.Mesh) -> Any:
    """The optimizer is left out on rank 0 alone, then on all ranks; a copy of the model is each rank's own."""
    model = big_model()
    box = [ZeroOptimizer(model, torch.optim.SGD, mesh, share_parameters=True, lr=1e-2)]
    before = engine.full_state_dict(model, mesh)
    other = {name: torch.zeros_like(value) for name, value in before.items()}
    texts = refusals(
        [
            lambda: engine.load_full_state_dict(model, mesh, other, box[0] if mesh.rank else None),
            lambda: engine.load_full_state_dict(nn.Sequential(*model), mesh, other),
        ]
    )
    same = all(torch.equal(value, before[name]) for name, value in engine.full_state_dict(model, mesh).items())
    own = copy.deepcopy(model)
    engine.load_full_state_dict(own, mesh, other)
    train(mesh, model, box[0], 1)  # nothing was changed, so nothing is refused
    return texts, same, all(bool((p == 0).all()) for p in own.parameters())


@shared_memory
def test_a_load_that_leaves_the_optimizer_out_is_refused_on_every_rank(world: World) -> None:
    for rank, (texts, same, loaded) in enumerate(world.run(Layout(data=2), left_out)):
        told = "share_parameters=True), which is written with its optimizer's knowledge only: call engine.load_full"
        assert ("what another rank was given" if rank else told) in texts[0]
        assert told in texts[1]
        assert same
        assert loaded


def moved(mesh: engine.Mesh, strategy: str, ranks: list[int]) -> Any:
    """torch gives memory that is shared by file name another place, and leaves a mapped file where it is."""
    strategies = torch.multiprocessing
    former = strategies.get_sharing_strategy()
    model = big_model()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, share_parameters=True, lr=1e-2)
    train(mesh, model, optimizer, 1)
    before = engine.full_state_dict(model, mesh)
    if mesh.rank in ranks:
        strategies.set_sharing_strategy(strategy)
        model.share_memory()
        strategies.set_sharing_strategy(former)
    texts = refusals([lambda: train(mesh, model, optimizer, 1)])
    after = engine.full_state_dict(model, mesh)
    again = ZeroOptimizer(model, torch.optim.SGD, mesh, share_parameters=True, lr=1e-2)
    train(mesh, model, again, 1)
    last = [p.sum().item() for p in model.parameters()]
    return texts, all(torch.equal(after[name], before[name]) for name in before), last


@shared_memory
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_shared_parameters_whose_memory_was_moved_are_an_error_on_every_rank(world: World, ranks: list[int]) -> None:
    found = world.run(Layout(data=2), moved, "file_system", ranks)
    for rank, (texts, same, _) in enumerate(found):
        own = "the memory of '0.weight' was moved after ZeroOptimizer was built"
        assert (own if rank in ranks else "changed in place or moved on another rank") in texts[0]
        assert same
    assert found[0][2] == found[1][2]


@shared_memory
def test_shared_parameters_that_torch_leaves_in_place_go_on(world: World) -> None:
    found = world.run(Layout(data=2), moved, "file_descriptor", [0, 1])
    assert [texts for texts, _, _ in found] == [["no error"]] * 2
    assert found[0][2] == found[1][2]


def slow_reader(mesh: engine.Mesh) -> bool:
    """Rank 1 reads long after its last collective of a step; rank 0 must not write meanwhile."""
    model = big_model()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, share_parameters=True, lr=1.0)
    steady = True
    for number in range(4):
        model(torch.full((2, SIDE), float(mesh.rank + number))).square().sum().backward()
        optimizer.finish_gradients(1e3)
        if mesh.rank == number % 2:
            once = copy.deepcopy(model)
            for _ in range(20):
                steady &= all(torch.equal(a, b) for a, b in zip(once.parameters(), model.parameters(), strict=True))
        optimizer.step()
        optimizer.zero_grad()
    return steady


@shared_memory
def test_nobody_writes_a_shared_parameter_that_another_rank_still_reads(world: World) -> None:
    assert world.run(Layout(data=2), slow_reader) == [True, True]


def refused(mesh: engine.Mesh) -> Any:
    model = big_model()
    with torch.no_grad():
        model[0].weight.add_(mesh.rank)
    weight = model[0].weight
    before, place = weight.detach().clone(), weight.data_ptr()

    def make(**options: Any) -> Any:
        return lambda: ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1, **options)

    kinds = [make(share_parameters=True, stage=stage) for stage in (0, 1)]
    kinds.append(make(share_parameters=mesh.rank == 0))
    kinds += [make(share_parameters="yes"), make(share_paramters=True), make(moment=0.9), make(params=[])]
    if not mesh.data.reads_in_place:
        kinds.append(make(share_parameters=True))
    return refusals(kinds), torch.equal(weight, before) and weight.data_ptr() == place


def test_sharing_where_it_cannot_be_is_refused_on_every_rank_before_anything_is_changed(world: World) -> None:
    for texts, same in world.run(Layout(data=2), refused):
        assert same
        assert "share_parameters=True is for stage 2, not stage=0" in texts[0]
        assert "share_parameters=True is for stage 2, not stage=1" in texts[1]
        assert "ZeroOptimizer's options differs over axis 'world'" in texts[2]
        assert texts[3] == "share_parameters='yes': give True or False"
        assert "no option 'share_paramters' (did you mean 'share_parameters'?): its own are groups, stage," in texts[4]
        assert "no option 'moment' (did you mean 'momentum'?)" in texts[5]
        assert "no option 'params'" in texts[6]
        assert SHARED or "transport='shm'" in texts[7]


def test_one_replica_needs_no_shared_memory(world: World) -> None:
    wanted = world.run(Layout(), trained, False)[0]
    found = world.run(Layout(), trained, True)[0]
    assert all(torch.equal(found[3][name], wanted[3][name]) for name in wanted[3])


WIDTH = 64


def squared(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output - target).square().sum(), target.shape[0]


def evaluated(mesh: engine.Mesh, share: bool) -> Any:
    """Evaluate after each of three steps, on 5 rows for data rank 0 and 3 for data rank 1."""
    layers = [engine.LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    model = engine.PipelineModel(layers, mesh)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh, share_parameters=share, lr=1e-2)
    step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=2)
    held_out = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    inputs, targets = (x.split([5, 3])[mesh.data.rank] for x in held_out)
    losses, evaluations = [], []
    for number in range(3):
        x, y = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(10 * number + mesh.data.rank))
        losses.append(step(x, y).loss.item())
        result = step.evaluate(inputs, targets)
        evaluations.append((result.loss.item(), result.tokens.item()))
    return losses, evaluations, engine.full_state_dict(model, mesh), held_out


@shared_memory
@pytest.mark.parametrize("layout", [Layout(data=2), Layout(data=2, pipeline=2)], ids=str)
def test_evaluation_reads_the_shared_parameters_and_leaves_no_trace(world: World, layout: Layout) -> None:
    apart = world.run(layout, evaluated, False)
    shared = world.run(layout, evaluated, True)
    _, _, state, (inputs, targets) = shared[0]
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plain.load_state_dict(state)
    expected = squared(plain(inputs), targets)[0].item() / 8
    for (losses, evaluations, weights, _), (own_losses, own_evaluations, own_weights, _) in zip(
        shared, apart, strict=True
    ):
        assert losses == own_losses
        assert evaluations == own_evaluations
        assert all(torch.equal(weights[name], own_weights[name]) for name in own_weights)
        assert evaluations[-1] == (pytest.approx(expected, rel=1e-5), 8)
        assert len({loss for loss, _ in evaluations}) == 3, "each saw the weights of its step"


class Frozen(nn.Module):
    """A part that is not trained: each rank keeps its own, and may change it."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.fixed = nn.Parameter(torch.ones(4), requires_grad=False)


def frozen(mesh: engine.Mesh) -> list[float]:
    model = Frozen()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, share_parameters=True, lr=0.1)
    for _ in range(2):
        (model.line(torch.ones(1, 4)) * model.fixed).sum().backward()
        optimizer.finish_gradients(mesh.data.size)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.fixed.add_(mesh.rank)
    return model.fixed.tolist()


@shared_memory
def test_what_is_not_trained_stays_each_ranks_own(world: World) -> None:
    assert world.run(Layout(data=2), frozen) == [[1.0] * 4, [3.0] * 4]
