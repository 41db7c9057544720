from collections.abc import Iterator

import pytest

from pdserve.text.grammars.checker import shared_checker


@pytest.fixture(scope="module", autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    shared_checker().close()
