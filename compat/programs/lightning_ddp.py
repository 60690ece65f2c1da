"""Lightning with strategy="ddp" or a spawned variant of it: `lightning_ddp.py STRATEGY`, started by plain python."""

from __future__ import annotations

import sys

import lightning
import torch
from outcome import leave
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    """A small network that adds up its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.losses: list[float] = []
        self.validations = 0

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return mse_loss(self.network(inputs), targets)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("validation", self._loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validations += 1  # the sanity check before training is one of them: it reads two batches

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def on_fit_end(self) -> None:
        trainer = self.trainer
        weights = sum(each.detach().double().sum().item() for each in self.parameters())
        leave(trainer.global_rank, trainer.global_step, self.validations, [*self.losses, weights])


def main() -> None:
    lightning.seed_everything(1)
    inputs = torch.randn(128, 8)
    targets = inputs.sum(1, keepdim=True)
    training = DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)
    validation = DataLoader(TensorDataset(inputs[:32], targets[:32]), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=sys.argv[1],
        max_epochs=2,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(), training, validation)


if __name__ == "__main__":
    main()
