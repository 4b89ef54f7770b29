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
        if (self.trainer.state.step + 1) % self.options.every:
            return
        data, dataset = batch[0].data, self.trainer.dataset
        shown = []
        for ids, labels, reward in zip(data["input_ids"], data["labels"], data["reward"], strict=True):
            targets = labels != IGNORE_INDEX
            start = int(targets.int().argmax()) + 1  # length of the prompt
            prompt, text = dataset.texts([ids[:start].tolist(), labels[targets].tolist()])
            shown.append({"prompt": prompt, "text": f"{text}  [reward {reward:.3g}]"})
            if len(shown) == self.options.number:
                break
        self.trainer.row["generated"] = shown
