"""DeepSpeed's ZeRO as a runner: `options` are what YAML may say, `partition` what a rank holds, `runner` the rest."""
