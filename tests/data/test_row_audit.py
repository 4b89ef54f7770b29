import pytest
from crosstrain_plugins.builtin.datasets.row_audit import RowAudit

from crosstrain.utils.errors import DataError


def test_a_key_that_nothing_reads_is_named_once_with_its_count_and_first_place():
    audit = RowAudit(["id", "meta"])
    for number in range(3):
        audit.row(f"a.jsonl:{number}", ["id", "meta.source", "weight", *(["messages.name"] if number else [])])
    [said] = audit.notices()
    assert "weight (3 of 3 rows, first in a.jsonl:0)" in said
    assert "messages.name (2 of 3 rows" in said
    assert "id" not in said.split(";")[0].replace("ignore", "")
    assert "meta" not in said


def test_counts_of_workers_add_up_to_those_of_one_process():
    whole, parts = RowAudit(), [RowAudit(), RowAudit()]
    for number in range(10):
        for audit in (whole, parts[number // 5]):
            audit.drop(f"f:{number}", f"it has {number} tokens") if number % 3 else audit.row(f"f:{number}", ["x"])
    added = RowAudit()
    for part in parts:
        added.add(part.plain)
    assert added.plain == whole.plain
    assert added.plain["reasons"] == {"it has N tokens": [6, "f:1: it has 1 tokens"]}


def test_a_share_of_dropped_rows_above_the_limit_is_an_error_that_says_why():
    audit = RowAudit()
    for number in range(10):
        audit.row(f"f:{number}")
    audit.drop("f:10", "no answer")
    audit.check("f", 0.1)
    audit.drop("f:11", "no answer")
    with pytest.raises(DataError, match=r"f: 2 of 12 rows are dropped, 2 such as f:10: no answer: more than max_dro"):
        audit.check("f", 0.1)


def test_names_without_end_are_counted_together():
    audit = RowAudit()
    for number in range(300):
        audit.row(f"f:{number}", [f"key{number}"])
    assert len(audit.plain["unread"]) == 101
    assert audit.plain["unread"]["others"][0] == 200
