"""Prepare and open the splits of the configured dataset."""

from pathlib import Path

import numpy as np

from crosstrain.config.load import Config
from crosstrain.config.registry import registry
from crosstrain.config.schema import Component
from crosstrain.data.dataset import Dataset, Split
from crosstrain.data.tokenizer import load_tokenizer
from crosstrain.utils.errors import ConfigError, DataError
from crosstrain.utils.trust import check_source, limited_to
from crosstrain.utils.types import Batch


def training_dataset(config: Config) -> Component:
    """Return the dataset to train on. Raises ConfigError if no dataset is configured."""
    return _labelled(config)[1]


def _labelled(config: Config) -> tuple[str, Component]:
    if not config.datasets:
        raise ConfigError("datasets: none is configured; use --cfg-path with a project file that has one")
    (labelled,) = config.datasets.items()
    return labelled


def named_splits(config: Config) -> list[Split]:
    """Return the splits for which the training dataset has separate files."""
    component = training_dataset(config)
    return registry.get("dataset", component.name).named_splits(component.options)


def open_split(config: Config, split: Split) -> Dataset:
    """Open a prepared split of the configured dataset.

    Raises DataError if the split is empty, and ConfigError if the configuration is not trusted to name data.
    """
    label, component = _labelled(config)
    with limited_to(config.trust):
        check_source(f"the {split} split of {label}")
        return open_dataset(component, split, f"datasets.{label}")


def open_dataset(component: Component, split: Split, address: str) -> Dataset:
    """Open a split of the dataset at the key `address` of a project. Messages of DataErrors begin with the address."""
    try:
        dataset = registry.get("dataset", component.name).open(component.options, split)
    except DataError as error:
        raise type(error)(f"{address}: {error.args[0]}", *error.args[1:]) from error
    dataset.address = address
    return dataset


def prepare_data(config: Config) -> None:
    """Create the dataset's missing files. Raises ConfigError as `open_split` does."""
    label, component = _labelled(config)
    with limited_to(config.trust):
        check_source(f"the dataset {label}")
        registry.get("dataset", component.name).prepare(component.options)


def is_prepared(config: Config) -> bool:
    """Return True if `prepare_data` has nothing to create. Raises DataError if an input is missing."""
    component = training_dataset(config)
    with limited_to(config.trust):
        return registry.get("dataset", component.name).is_prepared(component.options)


def vocabulary_size(config: Config) -> int | None:
    """Return the vocabulary size of the dataset's tokenizer, even before `prepare_data`; None: no local tokenizer."""
    component = training_dataset(config)
    name = registry.get("dataset", component.name).tokenizer_of(component.options)
    if name is None or not Path(name).expanduser().exists():
        return None
    with limited_to(config.trust):
        return load_tokenizer(name).vocab_size


def first_batch(dataset: Dataset) -> Batch:
    """Return a batch with only the first sample, on the meta device."""
    batch = dataset.collate([dataset.get(0, np.random.default_rng(0))])
    return {key: value.to("meta") for key, value in batch.items()}
