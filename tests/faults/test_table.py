# SPDX-License-Identifier: Apache-2.0
"""The table of faults is whole: each row has its tests, each test its row, each protection stands."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from faults.faults import DOCUMENT, FAULTS, PACKAGE, ROOT, Fault, document


def functions(file: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_has_its_tests_and_a_protection_that_stands(fault: Fault):
    for test in (fault.test, *fault.also):
        file, name = test.split("::")
        assert name in functions(ROOT / "tests" / file), f"{fault.name}: there is no {test}"
    assert fault.without
    for removal in fault.without:
        count = (ROOT / PACKAGE / removal.file).read_text().count(removal.text)
        assert count == 1, (
            f"{fault.name}: what protects it stands {count} times in {removal.file}, and once is wanted. "
            f"If it has moved, say in tests/faults/faults.py where to, and let tests/faults/prove.py "
            f"look that the test fails without it. It was:\n{removal.text}"
        )
        assert removal.put != removal.text


def test_each_test_of_a_fault_is_in_the_table():
    named = {test for fault in FAULTS for test in (fault.test, *fault.also)}
    here = Path(__file__).parent
    there = {
        f"faults/{file.name}::{name}"
        for file in here.glob("test_*.py")
        if file.name != Path(__file__).name
        for name in functions(file)
    }
    assert there - named == set()


def test_the_document_is_what_the_table_says():
    assert DOCUMENT.read_text() == document(), "python tests/faults/faults.py writes it"
