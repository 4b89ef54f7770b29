"""Find documents that repeat an earlier one, across all inputs, in bounded memory."""
