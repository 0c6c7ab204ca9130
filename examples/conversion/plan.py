"""Trains a small language model on the source of Python's argparse."""

import argparse
import os
import tempfile
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

import echelon as ec


class Text(Dataset):
    """Windows of a text in bytes, each with the bytes that follow."""

    def __init__(self, data: bytes, context: int) -> None:
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.data[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """The mean loss of the held-out batches."""
    model.eval()
    losses = []
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        losses.append(model.eval_step(x, target=y, loss_everywhere=True).item())
    model.train()
    return sum(losses) / len(losses)


def save(model: nn.Module, path: str) -> None:
    """Write the weights to ``path``, which is never half written."""
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(path) or ".", delete=False) as file:
        torch.save(model.whole_state_dict(), file)
    os.replace(file.name, path)


def main(args: argparse.Namespace) -> None:
    world = ec.init()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with open(args.data, "rb") as file:
        data = file.read()
    cut = len(data) * 9 // 10
    order = torch.Generator().manual_seed(args.seed)
    load = partial(DataLoader, batch_size=args.batch_size, drop_last=True)
    train_loader = load(Text(data[:cut], args.context), shuffle=True, generator=order)
    eval_loader = load(Text(data[cut:], args.context))

    model = GPT(args.layers, args.width, 4, args.context).to(device)
    plan = ec.Plan(pp=2, shard=2, microbatches=2)
    model = ec.parallelize(model, plan, world, loss_fn=loss_fn, units=ec.units.by_type(Block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    for epoch in range(args.epochs):
        for x, y in train_loader:
            x, y = (tensor[plan.data_rank(world) :: plan.data_size] for tensor in (x, y))
            x, y = x.to(device), y.to(device)
            model.step(x, target=y)
            ec.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        held_out = evaluate(model, eval_loader, device)
        print(f"epoch {epoch}  held out {held_out:.6f}")
    save(model, args.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=argparse.__file__, help="a text file")
    parser.add_argument("--out", default="model.pt", help="where the weights go")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
