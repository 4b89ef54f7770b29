"""The callback that records some of the completions that an objective samples."""

from dataclasses import dataclass

from crosstrain import IGNORE_INDEX, Callback, PositiveInt, Step, registry


@registry.register_callback("rollouts")
class Rollouts(Callback):
    """Adds sampled completions with their rewards to the metrics of some steps; the report shows them."""

    @dataclass
    class Options:
        """Which completions to record."""

        every: PositiveInt = 50  # steps between records
        number: PositiveInt = 4  # completions per record, from the first micro batch of the first rank

    def before_step(self, batch: Step) -> None:
        if (self.trainer.state.step + 1) % self.options.every or not self.trainer.is_main:
            return
        data, prompts, sampled = batch[0].data, list[list[int]](), list[list[int]]()
        for ids, labels in zip(data["input_ids"][: self.options.number], data["labels"], strict=False):
            targets = labels != IGNORE_INDEX
            prompts.append(ids[: int(targets.int().argmax()) + 1].tolist())
            sampled.append(labels[targets].tolist())
        texts = self.trainer.dataset.texts
        self.trainer.row["generated"] = [
            {"prompt": prompt, "text": f"{text}  [reward {reward:.3g}]"}
            for prompt, text, reward in zip(texts(prompts), texts(sampled), data["reward"], strict=False)
        ]
