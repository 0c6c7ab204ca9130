"""Right solutions of the notebooks' exercises, and typical wrong ones, as the text of the cell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """A change that makes a right solution wrong.

    Attributes:
        old: text of the right solution.
        new: what a wrong one has there.
        grade: a regular expression for what the grader says.
    """

    old: str
    new: str
    grade: str


@dataclass(frozen=True)
class Solved:
    """An exercise with its solution.

    Attributes:
        notebook: its file without the suffix.
        exercise: the tag of its cell.
        unsolved: a regular expression for what the grader says of the cell as it is stored.
        changes: texts of the stored cell, each with what the solution has in its place.
        mistakes: typical ones.
    """

    notebook: str
    exercise: str
    unsolved: str
    changes: tuple[tuple[str, str], ...]
    mistakes: tuple[Mistake, ...]


COLLECTIVES = "1_collectives"
DDP = "2_ddp_from_scratch"
ZERO = "3_zero"
PIPELINES = "4_pipelines"
HANGS = "5_hangs"
MEANS = "6_find_the_wrong_mean"
RACES = "7_races"

SOLVED = [
    Solved(
        COLLECTIVES,
        "two_steps",
        r"not solved yet: reduce_scatter_single.*\(to return: sum\)",
        (
            (
                '    raise NotImplementedError("reduce_scatter_single, then all_gather_single")\n',
                "    quarter = torch.empty(256)\n"
                '    world.group.reduce_scatter_single(quarter, values, "sum")\n'
                "    world.group.all_gather_single(values, quarter)\n",
            ),
        ),
        (
            Mistake('"sum")', '"mean")', r"rank 0, sum: differs from one process by"),
            Mistake(
                '    world.group.reduce_scatter_single(quarter, values, "sum")\n'
                "    world.group.all_gather_single(values, quarter)\n",
                "    everything = torch.empty(4 * 1024)\n"
                "    world.group.all_gather_single(everything, values)\n"
                "    values = everything.view(4, 1024).sum(0)\n",
                r"missing  [\d,]+ bytes of tensors at most on rank \d, 24,576 are allowed",
            ),
            Mistake(
                "    world.group.all_gather_single(values, quarter)\n",
                "    world.group.all_reduce(values)\n",
                r"missing  16,384 bytes sent",
            ),
            Mistake("    world.group.all_gather_single(values, quarter)\n", "", "differs"),
            Mistake('return {"sum": values}', "return values", "returned Tensor; return a dict"),
            Mistake("torch.empty(256)", "torch.empty(128)", "the ranks ended with ArgumentError"),
        ),
    ),
    Solved(
        COLLECTIVES,
        "ring",
        "not solved yet: pass vectors",
        (
            (
                '    raise NotImplementedError("pass vectors around the ring")\n',
                "    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size\n"
                "    gathered[world.rank] = vector(world.rank)\n"
                "    for i in range(world.size - 1):\n"
                "        old, new = (world.rank - i) % 4, (world.rank - i - 1) % 4\n"
                "        sending = world.group.isend(gathered[old], right)\n"
                "        world.group.recv(gathered[new], left)\n"
                "        sending.wait()\n",
            ),
        ),
        (
            Mistake("range(world.size - 1)", "range(world.size)", "missing  32,768 bytes sent"),
            Mistake("range(world.size - 1)", "range(world.size - 2)", "gathered: differs"),
            Mistake("world.group.isend(", "world.group.irecv(", "ended with DeadlockError"),
        ),
    ),
    Solved(
        DDP,
        "one_call",
        "not solved yet: one all_reduce",
        (
            (
                '    raise NotImplementedError("one all_reduce for all gradients")\n',
                "    grads = [p.grad for p in model.parameters()]\n"
                "    flat = torch.cat([grad.flatten() for grad in grads])\n"
                '    world.group.all_reduce(flat, "mean")\n'
                "    lengths = [grad.numel() for grad in grads]\n"
                "    for grad, mean in zip(grads, flat.split(lengths), strict=True):\n"
                "        grad.copy_(mean.view_as(grad))\n",
            ),
        ),
        (
            Mistake('"mean"', '"sum"', "differs from one process"),
            Mistake(
                '    world.group.all_reduce(flat, "mean")\n',
                '    for grad in grads:\n        world.group.all_reduce(grad, "mean")\n'
                "    return\n",
                "missing  18 calls on rank 0, 3 are allowed",
            ),
            Mistake("        grad.copy_(mean.view_as(grad))\n", "        pass\n", "differs"),
        ),
    ),
    Solved(
        DDP,
        "parts",
        "not solved yet: two backwards",
        (
            (
                '        raise NotImplementedError("two backwards, then average_each once")\n',
                "        for half_x, half_y in zip(x.chunk(2), y.chunk(2), strict=True):\n"
                "            (mse_loss(model(half_x), half_y) / 2).backward()\n"
                "        average_each(world, model)\n",
            ),
        ),
        (
            Mistake(" / 2)", ")", "differs from one process"),
            Mistake(
                "        average_each(world, model)\n",
                "            average_each(world, model)\n",
                r"missing  [\d,]+ bytes sent",
            ),
            Mistake("x.chunk(2), y.chunk(2)", "x.chunk(2), y.flip(0).chunk(2)", "differs"),
        ),
    ),
    Solved(
        ZERO,
        "zero_1",
        "not solved yet: average, step",
        (
            (
                '        raise NotImplementedError("average, step on the part, gather")\n',
                '        world.group.all_reduce(gradient, "mean")\n'
                "        part.grad = own_part(world, gradient)\n"
                "        optimizer.step()\n"
                "        optimizer.zero_grad()\n"
                "        world.group.all_gather_single(flat, part.detach().clone())\n",
            ),
        ),
        (
            Mistake('"mean"', '"sum"', "weights: differs"),
            Mistake(
                "        world.group.all_gather_single(flat, part.detach().clone())\n",
                "",
                "weights: differs",
            ),
            Mistake(
                "    part = nn.Parameter(own_part(world, flat))\n",
                "    part = nn.Parameter(own_part(world, flat))\n"
                "    states = [torch.zeros(NUMEL), torch.zeros(NUMEL)]\n",
                r"missing  [\d,]+ bytes of tensors at most",
            ),
        ),
    ),
    Solved(
        ZERO,
        "by_layers",
        "not solved yet: reduce-scatter weights",
        (
            (
                "        raise NotImplementedError("
                '"reduce-scatter weights[i].grad into parts[i].grad, and free it")\n',
                "        parts[i].grad = torch.empty(WIDTH * WIDTH // world.size)\n"
                "        gradient = weights[i].grad.flatten()\n"
                '        world.group.reduce_scatter_single(parts[i].grad, gradient, "mean")\n'
                "        weights[i].grad = None\n",
            ),
        ),
        (
            Mistake('"mean"', '"sum"', "weights: differs"),
            Mistake("        weights[i].grad = None\n", "", "weights: differs"),
            Mistake(
                "        weights[i].grad = None\n",
                "        if i == 0:\n"
                "            for weight in weights:\n"
                "                weight.grad = None\n",
                r"missing  [\d,]+ bytes of tensors at most",
            ),
        ),
    ),
    Solved(
        PIPELINES,
        "orders",
        "not solved yet: two lists",
        (
            (
                "    raise NotImplementedError("
                """'two lists such as ["0F0", "0F1", …] and ["1F0", "1B0", …]')\n""",
                '    first = "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3".split()\n'
                '    second = "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3".split()\n'
                "    return [first, second]\n",
            ),
        ),
        (
            Mistake(
                "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3",
                "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
                "at most 2 microbatches: is not so",
            ),
            Mistake(
                "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3",
                "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3",
                "bubble of a fifth: is not so",
            ),
            Mistake("0F0 0F1 0B0", "0F0 0B0", "the ranks ended with ScheduleError"),
        ),
    ),
    Solved(
        PIPELINES,
        "two_stages",
        "not solved yet: F0 F1 B0",
        (
            (
                "    raise NotImplementedError("
                '"F0 F1 B0 F2 B1 F3 B2 B3 on rank 0; F0 B0 F1 B1 … on rank 1")\n',
                "    alive, sends = [], []\n"
                '    actions = "F0 F1 B0 F2 B1 F3 B2 B3".split()\n'
                "    for action in actions if world.rank == 0 else []:\n"
                '        if action[0] == "F":\n'
                "            alive.append(stage(inputs[int(action[1])]))\n"
                "            sends.append(world.group.isend(alive[-1].detach(), 1))\n"
                "        else:\n"
                "            world.group.recv(received, 1)\n"
                "            sends.pop(0).wait()\n"
                "            alive.pop(0).backward(received)\n"
                "    for target in targets if world.rank == 1 else []:\n"
                "        world.group.recv(received, 0)\n"
                "        activation = received.clone().requires_grad_()\n"
                "        (mse_loss(stage(activation), target) / 4).backward()\n"
                "        world.group.send(activation.grad, 0)\n",
            ),
        ),
        (
            Mistake(" / 4)", ")", "gradient: differs"),
            Mistake(
                "F0 F1 B0 F2 B1 F3 B2 B3",
                "F0 F1 F2 F3 B0 B1 B2 B3",
                r"missing  [\d,]+ bytes of tensors at most on rank 0",
            ),
            Mistake("alive.pop(0)", "alive.pop()", "gradient: differs"),
            Mistake("send(activation.grad, 0)", "barrier()", "the ranks ended with"),
        ),
    ),
    Solved(
        HANGS,
        "empty_rank",
        "the ranks ended with DeadlockError",
        (
            (
                '    if len(values) == 0:\n        return {"mean": torch.tensor(0.0)}\n',
                "",
            ),
        ),
        (
            Mistake(
                "values.sum(), torch.tensor(float(len(values)))",
                "values.mean(), torch.tensor(1.0)",
                "differs",
            ),
            Mistake("values.sum(),", "values.sum() / 2,", "mean: differs"),
        ),
    ),
    Solved(
        HANGS,
        "uneven",
        "the ranks ended with DeadlockError",
        (
            (
                "    for value in batches_of(world.rank):\n"
                "        value = value.clone()\n"
                "        world.group.all_reduce(value)\n"
                "        total += value\n",
                "    batches = batches_of(world.rank)\n"
                "    while True:\n"
                "        has = torch.tensor(float(bool(batches)))\n"
                "        pair = torch.stack([batches.pop(0) if batches else has, has])\n"
                "        world.group.all_reduce(pair)\n"
                "        if pair[1] == 0:\n"
                "            break\n"
                "        total += pair[0]\n",
            ),
        ),
        (
            Mistake("if pair[1] == 0", "if pair[1] < world.size", "total: differs"),
            Mistake("torch.stack([", "torch.stack([has, ", "differs|missing"),
        ),
    ),
    Solved(
        HANGS,
        "neighbours",
        "the ranks ended with DeadlockError",
        (
            (
                "    world.group.recv(received, left)\n"
                "    world.group.send(torch.full((2,), float(world.rank)), right)\n",
                "    sending = world.group.isend(torch.full((2,), float(world.rank)), right)\n"
                "    world.group.recv(received, left)\n"
                "    sending.wait()\n",
            ),
        ),
        (
            Mistake("float(world.rank)), right", "float(world.rank)), left", "ended with|differs"),
            Mistake("float(world.rank)", "float(world.rank + 1)", "received: differs"),
        ),
    ),
    Solved(
        MEANS,
        "tokens",
        "weight: differs from one process",
        (
            (
                "    for _ in range(3):\n        loss = cross_entropy(model(tokens), targets)\n",
                "    count = (targets != -100).sum().double()\n"
                "    world.group.all_reduce(count)\n"
                "    for _ in range(3):\n"
                '        loss = cross_entropy(model(tokens), targets, reduction="sum") / count\n',
            ),
            ('all_reduce(model.weight.grad, "mean")', 'all_reduce(model.weight.grad, "sum")'),
        ),
        (
            Mistake('grad, "sum")', 'grad, "mean")', "weight: differs"),
            Mistake("    world.group.all_reduce(count)\n", "", "weight: differs"),
            Mistake("(targets != -100).sum().double()", "torch.tensor(20.0)", "weight: differs"),
            Mistake(
                "    world.group.all_reduce(count)\n",
                "    world.group.all_reduce(count)\n    world.group.all_reduce(torch.zeros(99))\n",
                "bytes sent",
            ),
        ),
    ),
    Solved(
        MEANS,
        "clipping",
        "differs from one process",
        (
            ("        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n", ""),
            (
                '            world.group.all_reduce(param.grad, "sum")\n',
                '            world.group.all_reduce(param.grad, "sum")\n'
                "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
            ),
        ),
        (
            Mistake("_(model.parameters(), 0.1)", "_(model.parameters(), 0.05)", "differs"),
            Mistake(
                "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
                "            nn.utils.clip_grad_norm_(param, 0.1)\n",
                "differs",
            ),
        ),
    ),
    Solved(
        RACES,
        "prefetcher",
        r"missing  read after write\n.*copy_ on stream \d+.*\n.*sum on the default stream",
        (
            (
                '            ahead.append(host.to("cuda", non_blocking=True))\n',
                '            batch = host.to("cuda", non_blocking=True)\n'
                "            ahead.append((batch, copies.record_event()))\n",
            ),
            (
                "        batch = ahead.popleft()\n",
                "        batch, copied = ahead.popleft()\n"
                "        compute.wait_event(copied)\n"
                "        batch.record_stream(compute)\n",
            ),
        ),
        (
            Mistake(
                "        batch.record_stream(compute)\n",
                "",
                r"missing  use after free\n.*sum on the default stream.*\n.*allocation on stream",
            ),
            Mistake("record_stream(compute)", "record_stream(copies)", "missing  use after free"),
            Mistake("compute.wait_event(copied)", "copies.wait_event(copied)", "read after write"),
            Mistake(
                "compute.wait_event(copied)",
                "compute.wait_stream(copies)",
                r"no races\n  missing  12 steps of the device, 11 are allowed",
            ),
            Mistake(
                "        compute.wait_event(copied)\n",
                "        torch.cuda.synchronize()\n",
                r"no races\n  missing  \d+ steps of the device",
            ),
            Mistake("batch.sum()", "batch.sum().item()", "the program ended with TypeError"),
        ),
    ),
    Solved(
        RACES,
        "offloaded",
        r"missing  read after write\n.*copy_ on stream \d+.*\n.*sub_ on the host",
        (
            (
                "        with torch.cuda.stream(copies):\n"
                "            gradient.copy_(on_device, non_blocking=True)\n",
                "        copies.wait_stream(compute)\n"
                "        with torch.cuda.stream(copies):\n"
                "            gradient.copy_(on_device, non_blocking=True)\n"
                "        copies.synchronize()\n",
            ),
            (
                "            weight.copy_(master, non_blocking=True)\n",
                "            weight.copy_(master, non_blocking=True)\n"
                "        compute.wait_stream(copies)\n",
            ),
        ),
        (
            Mistake(
                "        copies.wait_stream(compute)\n",
                "",
                r"missing  read after write\n.*mul on the default stream.*\n.*copy_ on stream",
            ),
            Mistake(
                "        copies.synchronize()\n",
                "",
                r"missing  write after read\n.*copy_ on stream.*\n.*sub_ on the host",
            ),
            Mistake(
                "        compute.wait_stream(copies)\n",
                "",
                r"missing  read after write\n.*copy_ on stream.*\n.*mul on the default stream",
            ),
            Mistake("sub_(gradient)", "sub_(2 * gradient)", r"returned \[.*instead of \[0.125"),
        ),
    ),
]
