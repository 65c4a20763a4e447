"""Every operation of a process group, as cases: `case(rank, size) -> tensors to compare`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COUNTS = (0, 1, 7, 1000, 100_003)
ORDERED = {"sum": ReduceOp.SUM, "product": ReduceOp.PRODUCT, "min": ReduceOp.MIN, "max": ReduceOp.MAX}
BITS = {"band": ReduceOp.BAND, "bor": ReduceOp.BOR, "bxor": ReduceOp.BXOR}


def sample(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: every order of additions gives the same sum in every type."""
    generator = torch.Generator().manual_seed(rank * 1000 + count)
    return torch.randint(1, 4, (count,), generator=generator).to(dtype)


def uneven(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sum depends on the order of additions."""
    generator = torch.Generator().manual_seed(rank * 1000 + count)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def all_reduce_matrix(rank: int, size: int) -> list[torch.Tensor]:
    results = []
    for dtype in (*INTEGERS, *FLOATS):
        operations = {**ORDERED, **(BITS if dtype in INTEGERS else {})}
        for operation in operations.values():
            for count in COUNTS:
                tensor = sample(rank, count, dtype)
                dist.all_reduce(tensor, operation)
                results.append(tensor)
    return results


def all_reduce_average(rank: int, size: int) -> list[torch.Tensor]:
    results = []
    for dtype in FLOATS:
        for count in COUNTS:
            tensor = sample(rank, count, dtype) * 4
            dist.all_reduce(tensor, ReduceOp.AVG)
            expected = sum(sample(other, count, dtype) * 4 for other in range(size)) / size
            assert torch.equal(tensor, expected)
            results.append(tensor)
    return results


def all_reduce_order(rank: int, size: int) -> list[torch.Tensor]:
    """Rounding shows the order of additions: equal on all ranks and, for keepstep, on every transport."""
    results = []
    for dtype in FLOATS:
        for count in (5, 3000, 50_001, 700_001):
            tensor = uneven(rank, count, dtype)
            dist.all_reduce(tensor)
            results.append(tensor)
    return results


def all_reduce_shapes(rank: int, size: int) -> list[torch.Tensor]:
    strided = sample(rank, 600, torch.float32).view(20, 30).t()
    dist.all_reduce(strided)
    complex_one = torch.complex(sample(rank, 50, torch.float32), sample(rank + 1, 50, torch.float32))
    dist.all_reduce(complex_one)
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, ReduceOp.MAX)
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    return [strided, torch.view_as_real(complex_one), flags, scalar]


def all_reduce_strided(rank: int, size: int) -> list[torch.Tensor]:
    """A view with gaps: Gloo reduces what lies between and not what lies behind."""
    tensor = sample(rank, 600, torch.float32)
    between = tensor[1::2].clone()
    dist.all_reduce(tensor[::2])
    assert torch.equal(tensor[1::2], between)
    assert torch.equal(tensor[::2], sum(sample(other, 600, torch.float32)[::2] for other in range(size)))
    return [tensor]


def all_reduce_coalesced(rank: int, size: int) -> list[torch.Tensor]:
    tensors = [sample(rank, count, torch.float32) for count in (3, 0, 1000, 40_000)]
    dist.all_reduce_coalesced(tensors)
    return tensors


def coalescing_manager(rank: int, size: int) -> list[torch.Tensor]:
    from torch.distributed.distributed_c10d import _coalescing_manager

    first, second = sample(rank, 5, torch.float32), sample(rank, 9, torch.float32)
    with _coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(first)
        dist.all_reduce(second)
    manager.wait()
    gathered = [torch.zeros(size * 5), torch.zeros(size * 9)]
    with _coalescing_manager():
        dist.all_gather_into_tensor(gathered[0], first)
        dist.all_gather_into_tensor(gathered[1], second)
    parts = [torch.zeros(5), torch.zeros(9)]
    with _coalescing_manager():
        dist.reduce_scatter_tensor(parts[0], gathered[0].clone())
        dist.reduce_scatter_tensor(parts[1], gathered[1].clone())
    return [first, second, *gathered, *parts]


def reduce_to_each(rank: int, size: int) -> list[torch.Tensor]:
    results = []
    for root in range(size):
        for count in COUNTS:
            tensor = sample(rank, count, torch.float32)
            dist.reduce(tensor, root)
            if rank == root:
                results.append(tensor)
    return results


def broadcast_from_each(rank: int, size: int) -> list[torch.Tensor]:
    results = []
    for root in range(size):
        for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float64):
            tensor = sample(rank, 999, torch.float32).to(dtype)
            dist.broadcast(tensor, root)
            results.append(torch.view_as_real(tensor) if dtype.is_complex else tensor)
    strided = sample(rank, 600, torch.float32).view(20, 30).t()
    dist.broadcast(strided, 1)
    large = sample(rank, 300_000, torch.float32)
    dist.broadcast(large, 2)
    return [*results, strided, large]


def all_gather_lists(rank: int, size: int) -> list[torch.Tensor]:
    results = []
    for count in COUNTS:
        outputs = [torch.zeros(count) for _ in range(size)]
        dist.all_gather(outputs, sample(rank, count, torch.float32))
        results += outputs
    strided = [torch.zeros(6, 4).t() for _ in range(size)]
    dist.all_gather(strided, sample(rank, 24, torch.float32).view(4, 6))
    return [*results, *strided]


def all_gather_single(rank: int, size: int) -> list[torch.Tensor]:
    results = []
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        for count in COUNTS:
            output = torch.zeros(size * count, dtype=dtype)
            dist.all_gather_into_tensor(output, sample(rank, count, dtype))
            results.append(output)
    in_place = torch.zeros(size * 10)
    own = in_place[rank * 10 : rank * 10 + 10].copy_(sample(rank, 10, torch.float32))
    dist.all_gather_into_tensor(in_place, own)
    return [*results, in_place]


def reduce_scatter_single(rank: int, size: int) -> list[torch.Tensor]:
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for count in COUNTS:
            output = torch.zeros(count, dtype=dtype)
            dist.reduce_scatter_tensor(output, sample(rank, size * count, dtype))
            results.append(output)
    return results


def reduce_scatter_average(rank: int, size: int) -> list[torch.Tensor]:
    output = torch.zeros(100)
    dist.reduce_scatter_tensor(output, sample(rank, size * 100, torch.float32), ReduceOp.AVG)
    expected = sum(sample(other, size * 100, torch.float32) for other in range(size)) / size
    assert torch.equal(output, expected[rank * 100 : rank * 100 + 100])
    return [output]


def all_to_all_single(rank: int, size: int) -> list[torch.Tensor]:
    output = torch.zeros(size * 3, 2)
    dist.all_to_all_single(output, sample(rank, size * 6, torch.float32).view(size * 3, 2))
    sends = [rank + other for other in range(size)]  # to rank `other`; zero rows occur
    receives = [other + rank for other in range(size)]
    split = torch.zeros(sum(receives), 3)
    dist.all_to_all_single(split, sample(rank, sum(sends) * 3, torch.float32).view(-1, 3), receives, sends)
    return [output, split]


def gather_and_scatter(rank: int, size: int) -> list[torch.Tensor]:
    results = []
    for root in range(size):
        outputs = [torch.zeros(11) for _ in range(size)] if rank == root else None
        dist.gather(sample(rank, 11, torch.float32), outputs, dst=root)
        results += outputs or []
        output = torch.zeros(11)
        inputs = [sample(root + other, 11, torch.float32) for other in range(size)] if rank == root else None
        dist.scatter(output, inputs, src=root)
        results.append(output)
    return results


def only_here_lists(rank: int, size: int) -> list[torch.Tensor]:
    """What Gloo does not take, against what it must be: uneven all_gather, lists of reduce_scatter and all_to_all."""
    uneven_outputs = [torch.zeros(other * 5) for other in range(size)]
    dist.all_gather(uneven_outputs, sample(rank, rank * 5, torch.float32))
    assert all(torch.equal(one, sample(other, other * 5, torch.float32)) for other, one in enumerate(uneven_outputs))
    part = torch.zeros(rank + 1)
    dist.reduce_scatter(part, [torch.full((other + 1,), float(rank)) for other in range(size)])
    assert torch.equal(part, torch.full((rank + 1,), float(sum(range(size)))))
    outputs = [torch.zeros(other + rank + 1) for other in range(size)]
    dist.all_to_all(outputs, [torch.full((other + rank + 1,), float(rank)) for other in range(size)])
    assert all(torch.equal(one, torch.full((other + rank + 1,), float(other))) for other, one in enumerate(outputs))
    short = torch.full((3,), rank + 1, dtype=torch.int16)
    dist.all_reduce(short)
    assert short.tolist() == [sum(range(size)) + size] * 3
    return [*uneven_outputs, part, *outputs]


def point_to_point(rank: int, size: int) -> list[torch.Tensor]:
    right, left = (rank + 1) % size, (rank - 1) % size
    got = [torch.zeros(count) for count in (1, 70_000)]
    for tensor in got:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sample(rank, tensor.numel(), torch.float32), right),
                dist.P2POp(dist.irecv, tensor, left),
            ]
        )
        for work in works:
            work.wait()
    if rank == 0:
        dist.send(torch.tensor([5.0]), 1, tag=1)
        dist.send(torch.tensor([6.0]), 1, tag=2)
    if rank == 1:
        second, first = torch.zeros(1), torch.zeros(1)
        works = [dist.irecv(second, 0, tag=2), dist.irecv(first, 0, tag=1)]
        for work in works:
            work.wait()
        got += [first, second]
    dist.barrier()
    return got


def from_any_source(rank: int, size: int) -> list[torch.Tensor]:
    if rank:
        dist.send(torch.tensor([float(rank)]), 0)
        return []
    seen = {}
    for _ in range(size - 1):
        tensor = torch.zeros(1)
        seen[dist.recv(tensor)] = tensor
    return [seen[other] for other in range(1, size)]


def asynchronous(rank: int, size: int) -> list[torch.Tensor]:
    tensors = [sample(rank, 1000 + number, torch.float32) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    chained = works[3].get_future().then(lambda done: done.value()[0] * 2).then(lambda done: done.value() + 1)
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    nested = sample(rank, 10, torch.float32)

    def again(done: torch.futures.Future) -> torch.Tensor:
        """As PowerSGD does: waits for another collective inside a callback."""
        return dist.all_reduce(nested, async_op=True).get_future().wait()[0] + done.value()[0].sum() * 0

    last = dist.all_reduce(sample(rank, 10, torch.float32), async_op=True).get_future().then(again)
    return [*tensors, chained.wait(), last.wait()]


def groups(rank: int, size: int) -> list[torch.Tensor]:
    even, odd = dist.new_group([0, 2]), dist.new_group([3, 1])
    mine = even if rank % 2 == 0 else odd
    tensor = sample(rank, 50, torch.float32)
    dist.all_reduce(tensor, group=mine)
    pair, _ = dist.new_subgroups(2)
    other = sample(rank, 5, torch.float32)
    dist.broadcast(other, group=pair, group_src=1)
    moved = torch.zeros(2)
    if dist.get_rank(mine) == 0:
        dist.send(torch.ones(2) * rank, group=mine, group_dst=1)
    else:
        dist.recv(moved, group=mine, group_src=0)
    return [tensor, other, moved]


def objects(rank: int, size: int) -> list[object]:
    everything: list[object] = [None] * size
    dist.all_gather_object(everything, {"rank": rank, "text": "x" * rank * 100})
    told = [f"from {rank}", rank]
    dist.broadcast_object_list(told, src=2)
    gathered: list[object] | None = [None] * size if rank == 1 else None
    dist.gather_object(rank * 2, gathered, dst=1)
    scattered: list[object] = [None]
    dist.scatter_object_list(scattered, [f"for {other}" for other in range(size)] if rank == 0 else None, src=0)
    return [everything, told, gathered, scattered]


def functional(rank: int, size: int) -> list[torch.Tensor]:
    import torch.distributed._functional_collectives as functions

    world = dist.group.WORLD
    tensor = sample(rank, 8, torch.float32)
    results = [
        functions.all_reduce(tensor, "sum", world),
        functions.all_gather_tensor(tensor, 0, world),
        functions.reduce_scatter_tensor(sample(rank, size * 2, torch.float32), "sum", 0, world),
        functions.all_to_all_single(sample(rank, size, torch.float32), None, None, world),
        functions.broadcast(tensor, 1, world),
        *functions.all_reduce_coalesced([tensor, tensor * 2], "sum", world),
        *functions.all_gather_into_tensor_coalesced([tensor, tensor * 3], world),
        *functions.reduce_scatter_tensor_coalesced([sample(rank, size, torch.float32)] * 2, "sum", [0, 0], world),
    ]
    return [result + 0 for result in results]


COMPARED = {
    case.__name__: case
    for case in (
        all_reduce_matrix,
        all_reduce_order,
        all_reduce_shapes,
        all_reduce_coalesced,
        coalescing_manager,
        reduce_to_each,
        broadcast_from_each,
        all_gather_lists,
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
        gather_and_scatter,
        point_to_point,
        from_any_source,
        asynchronous,
        groups,
        objects,
        functional,
    )
}
OURS = {
    case.__name__: case for case in (all_reduce_average, all_reduce_strided, reduce_scatter_average, only_here_lists)
}
