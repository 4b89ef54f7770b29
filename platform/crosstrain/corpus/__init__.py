"""From raw text to cleaned, de-duplicated documents, in bounded memory, on all cores, restartable."""
