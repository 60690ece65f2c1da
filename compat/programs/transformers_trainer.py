"""Hugging Face transformers' Trainer: a tiny Llama made from its configuration, gradient accumulation, evaluation."""

from __future__ import annotations

import torch
from outcome import leave
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCABULARY = 64
CONTEXT = 16


class RandomTokens(Dataset):
    """Sequences of random tokens, the same on every rank."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (size, CONTEXT), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    set_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2 * CONTEXT,
        )
    )
    arguments = TrainingArguments(
        output_dir="output",
        max_steps=12,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=6,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        seed=1,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=RandomTokens(256, seed=1), eval_dataset=RandomTokens(32, seed=2)
    )
    trainer.train()
    history = trainer.state.log_history
    evaluations = [each["eval_loss"] for each in history if "eval_loss" in each]
    losses = [each["loss"] for each in history if "loss" in each]
    weights = sum(each.detach().double().sum().item() for each in model.parameters())
    leave(arguments.process_index, trainer.state.global_step, len(evaluations), [*losses, *evaluations, weights])
    # Ranks that end at different times make gloo abort, or wait for ever, now and then.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
