"""Programs of the ranks of a group: models of Transformers on the rows of one rank, and mistakes in calling them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

from anyattn import distributed as ad
from anyattn import masks
from anyattn.integrations.transformers import NAME
from tests.support.ranks import message_of
from tests.support.transformers_models import by_module, decoder, tokens

BLOCK = 8  # of masks: the sequences are short


def planned(model: Any, batch: dict[str, Any], mesh: Any, **options: Any) -> Any:
    return ad.plan(ad.transformers_masks(model.config, batch, block_size=BLOCK), mesh, **options)


def losses(mesh: Any, name: str, batch: dict[str, Any], how: str = "active", changes: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Logits, loss and gradients of the whole batch from the shards of it. how: "active", or "argument": the masks are passed to the model;
    "checkpoint": active, with gradient checkpointing; "heads": active, and heads travel; "compiled": as an argument of the compiled model.
    """
    model = decoder(name, **(changes or {}))
    model.set_attn_implementation(NAME)
    if how == "checkpoint":
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    plan = planned(model, batch, mesh, transport="heads" if how == "heads" else "auto")
    shard = plan.shard_batch(batch)
    if how in ("active", "checkpoint", "heads"):
        with ad.active(plan):
            out = model(**shard)
    else:
        of_layers = plan.mask if len(plan.mask) > 1 else next(iter(plan.mask.values()))
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "compiled" else model
        out = called(**shard, attention_mask=of_layers)
    out.loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=mesh.get_group())
    loss = out.loss.detach()
    dist.all_reduce(loss, group=mesh.get_group())
    logits = plan.unshard(out.logits.detach(), dim=1)
    if "attention_mask" in batch:
        logits = logits[batch["attention_mask"].bool()]
    return {**by_module(model, logits), "loss": loss[None]}


def shards(mesh: Any, batch: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """This rank's batch of a causal plan, and its positions."""
    plan = ad.plan(masks.causal(), mesh, S=batch["input_ids"].shape[1], device="cpu")
    return plan.shard_batch(batch), plan.positions


def trained(mesh: Any, folder: str, port: int) -> list[tuple[float, float]]:
    """Loss and norm of the gradients of each step of a Trainer on packed texts. mesh: None for one process without a plan."""
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    class ContextParallelTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            of_dp = (1, 0) if mesh is None else (grid["dp"].size(), grid["dp"].get_local_rank())
            sampler: Any = DistributedSampler(self.train_dataset, *of_dp, seed=self.args.seed)
            return DataLoader(self.train_dataset, self.args.train_batch_size, sampler=sampler, collate_fn=self.data_collator)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            if mesh is None:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            plan = planned(self.model, inputs, grid["cp"])
            count = num_items_in_batch / grid["cp"].size()
            with ad.active(plan):
                return super().compute_loss(model, plan.shard_batch(inputs), return_outputs, count)

    if mesh is not None:
        rank = str(mesh.get_local_rank())
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(mesh.size())}
        grid = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "cp"))
        os.environ.update({**where, "RANK": rank, "LOCAL_RANK": rank})  # by which accelerate knows the group
    model = decoder("mistral")
    model.config.use_cache = False
    model.set_attn_implementation(NAME)
    rows = [{"input_ids": tokens(1, n, seed=n)[0].tolist()} for n in (15, 29, 3, 18, 26, 7, 44, 10, 5, 30, 21, 12, 9, 33, 17, 6)]
    arguments = TrainingArguments(
        output_dir=folder, max_steps=4, learning_rate=1e-3, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True, seed=0, per_device_train_batch_size=4,
    )  # fmt: skip
    trainer = ContextParallelTrainer(model=model, args=arguments, train_dataset=rows, data_collator=DataCollatorWithFlattening())
    trainer.train()
    assert mesh is None or trainer.accelerator.num_processes == mesh.size()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def message(mesh: Any, mistake: Callable[..., Any], name: str, batch: dict[str, Any]) -> str:
    """The message of the error that a mistake raises."""
    model = decoder(name)
    model.set_attn_implementation(NAME)
    return message_of(lambda: mistake(model, batch, planned(model, batch, mesh)))


def without_active(model: Any, batch: dict[str, Any], plan: Any) -> Any:
    return model(**plan.shard_batch(batch))


def compiled_without_active(model: Any, batch: dict[str, Any], plan: Any) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)(**plan.shard_batch(batch))


def compiled_in_active(model: Any, batch: dict[str, Any], plan: Any) -> Any:
    with ad.active(plan):
        return torch.compile(model, backend="aot_eager", fullgraph=True)(**plan.shard_batch(batch))


def whole_batch(model: Any, batch: dict[str, Any], plan: Any) -> Any:
    with ad.active(plan):
        return model(**batch, use_cache=False)


def whole_mask(model: Any, batch: dict[str, Any], plan: Any) -> Any:
    mask = torch.ones_like(batch["input_ids"])
    return model(input_ids=plan.shard(batch["input_ids"]), attention_mask=mask, use_cache=False)


def whole_mask_in_active(model: Any, batch: dict[str, Any], plan: Any) -> Any:
    with ad.active(plan):
        return model(**plan.shard_batch(batch), attention_mask=torch.ones_like(batch["input_ids"]))


def own_mask(model: Any, batch: dict[str, Any], plan: Any) -> Any:
    with ad.active(plan):
        shard = plan.shard_batch(batch)
        rows = shard["input_ids"].shape[1]
        return model(**shard, attention_mask=torch.ones(1, 1, rows, rows, dtype=torch.bool))


def missing_kind(model: Any, batch: dict[str, Any], plan: Any) -> Any:
    only = {"full_attention": ad.transformers_masks(model.config, batch, block_size=BLOCK)["full_attention"]}
    with ad.active(ad.plan(only, plan.channel.group)) as less:
        return model(**less.shard_batch(batch))


def no_group(model: Any, batch: dict[str, Any], plan: Any) -> Any:
    with ad.active(planned(model, batch, None, ranks=plan.ranks)):
        return None


def no_plan(model: Any, batch: dict[str, Any], plan: Any) -> Any:
    with ad.active(plan.mask):
        return None


def unknown_rows(model: Any, batch: dict[str, Any], plan: Any) -> Any:
    return plan.shard_batch({**batch, "weights": torch.ones_like(batch["input_ids"])})


def unshifted_by_the_model(model: Any, batch: dict[str, Any], plan: Any) -> Any:
    """A model that takes labels alone computes no loss from those of a shard."""
    with ad.active(plan):
        shard = plan.shard_batch(batch)
        del shard["shift_labels"]
        loss = model(**shard).loss
    raise ArithmeticError(f"the loss is {loss.item()}")


# the mistake -> the model, and a part of the error's message
MISTAKES: dict[Callable[..., Any], tuple[str, str]] = {
    without_active: ("llama", "ValueError: position_ids are the rows of one rank (ContextPlan.shard_batch), but no plan is active"),
    compiled_without_active: ("llama", "position_ids are the rows of one rank"),
    compiled_in_active: ("llama", "a compiled model makes its masks inside anyattn.distributed.active"),
    whole_batch: ("gpt_oss", "of the 112 rows of the active plan; wanted model(**plan.shard_batch(batch))"),
    whole_mask: ("llama", "or, if these are the rows of one of several ranks, no attention_mask, inside anyattn.distributed.active(plan)"),
    whole_mask_in_active: ("mistral", "without attention_mask and without a cache"),
    own_mask: ("llama", "ValueError: a causal layer has a Tensor as its mask inside anyattn.distributed.active"),
    missing_kind: ("gpt_oss", "ValueError: a layer of sliding_attention has no mask in the active plan, which has ['full_attention']"),
    no_group: ("llama", "ValueError: the plan has no process group"),
    no_plan: ("llama", "TypeError: plan is a dict; wanted the result of anyattn.distributed.plan"),
    unknown_rows: ("llama", "ValueError: batch['weights'] has shape (1, 112)"),
    unshifted_by_the_model: ("llama", "ArithmeticError: the loss is 0.0"),
}
