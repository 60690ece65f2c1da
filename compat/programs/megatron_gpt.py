"""Megatron-core: a tiny GPT of its layers, cut into two pipeline stages, trained with its 1F1B schedule, and evaluated.

Its code names the device "cuda" outright; where there is none, the program puts "cpu" in its place. It is unmodified.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from outcome import leave
from torch.overrides import TorchFunctionMode

STEPS = 10
MICROBATCHES = 4
CONTEXT = 16
VOCABULARY = 64
MICROBATCH = 2


class OnHost(TorchFunctionMode):
    """Puts "cpu" where a call asks for a CUDA device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def batches(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(MICROBATCHES):
        yield torch.randint(0, VOCABULARY, (MICROBATCH, CONTEXT + 1), generator=generator)


def forward_step(data: Iterator[torch.Tensor], model: GPTModel) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    positions = torch.arange(CONTEXT).expand(MICROBATCH, CONTEXT)
    mask = torch.triu(torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool), 1)
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return losses.mean(), losses.detach().mean()

    return output, loss


def main() -> None:
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    torch.manual_seed(1)
    # Its generators are those of CUDA devices; these leave the random numbers to torch.
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        batch_p2p_sync=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=CONTEXT,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        model=[model],
        num_microbatches=MICROBATCHES,
        seq_length=CONTEXT,
        micro_batch_size=MICROBATCH,
    )
    losses: list[torch.Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses += run(data_iterator=[batches(step)], forward_only=False)
        optimizer.step()
    losses += run(data_iterator=[batches(STEPS)], forward_only=True)
    weights = sum(each.detach().double().sum().item() for each in model.parameters())
    leave(rank, STEPS, None, [*(each.item() for each in losses), weights])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"
    with OnHost():
        main()
