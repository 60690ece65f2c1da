"""Teach a small convolutional network which package of the standard library a snippet of source code comes from.

    python examples/train_single.py

One process, nothing distributed. With the defaults it takes about ten seconds on two cores and names the right one of
eight packages for about three of four snippets that it has never seen.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PACKAGES = ("asyncio", "email", "encodings", "importlib", "logging", "multiprocessing", "unittest", "xml")
VALIDATION_EVERY = 8  # one snippet of so many is held out


def snippets(length: int) -> tuple[Tensor, Tensor]:
    """The packages' sources cut into pieces of `length` bytes, and the number of the package that each is from."""
    root = Path(sysconfig.get_path("stdlib"))
    pieces: list[Tensor] = []
    labels: list[Tensor] = []
    for number, package in enumerate(PACKAGES):
        source = b"".join(path.read_bytes() for path in sorted((root / package).rglob("*.py")))
        whole = len(source) // length * length
        piece = torch.frombuffer(bytearray(source[:whole]), dtype=torch.uint8).view(-1, length)
        pieces.append(piece)
        labels.append(torch.full((len(piece),), number))
    return torch.cat(pieces), torch.cat(labels)


class SnippetClassifier(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width // 2)
        self.features = nn.Sequential(
            nn.Conv1d(width // 2, width, kernel_size=8, stride=4, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, kernel_size=5, stride=2, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(width, len(PACKAGES))

    def forward(self, text: Tensor) -> Tensor:
        features = self.features(self.embedding(text.long()).transpose(1, 2))
        return self.classifier(features.amax(dim=2))


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], device: torch.device) -> float:
    model.eval()
    right = torch.zeros((), dtype=torch.long, device=device)
    seen = 0
    for text, label in loader:
        right += (model(text.to(device)).argmax(dim=1) == label.to(device)).sum()
        seen += len(label)
    model.train()
    return right.item() / seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a small text classifier.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--length", type=int, default=256, help="bytes per snippet")
    parser.add_argument("--width", type=int, default=32, help="channels")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="at its peak")
    parser.add_argument("--workers", type=int, default=1, help="data loading processes")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text, label = snippets(args.length)
    held_out = torch.arange(len(text)) % VALIDATION_EVERY == 0
    loader = DataLoader(
        TensorDataset(text[~held_out], label[~held_out]),
        args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    validation_loader = DataLoader(TensorDataset(text[held_out], label[held_out]), args.batch_size)

    model = SnippetClassifier(args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.learning_rate, total_steps=args.epochs * len(loader)
    )
    print(f"{len(text):,} snippets of {len(PACKAGES)} packages, on {device.type}", flush=True)

    started = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        total = torch.zeros((), device=device)
        for snippet, package in loader:
            loss = F.cross_entropy(model(snippet.to(device)), package.to(device))
            total += loss.detach()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print(
            f"epoch {epoch}  loss {total.item() / len(loader):.3f}"
            f"  validation accuracy {accuracy(model, validation_loader, device):.1%}"
            f"  {time.perf_counter() - started:.1f} s",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "classifier.pt"
        torch.save(model.state_dict(), path)
        model.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    print(f"restored from its checkpoint: {accuracy(model, validation_loader, device):.1%}", flush=True)


if __name__ == "__main__":
    main()
