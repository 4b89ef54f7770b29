"""The program's verbs, one module each."""
