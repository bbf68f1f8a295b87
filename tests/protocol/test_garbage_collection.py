import gc

import pytest

from protocol.garbage_collection import without_garbage_collection


def test_collection_goes_on_after_the_block_and_after_an_error_in_it() -> None:
    with without_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), without_garbage_collection():
        raise ImportError
    assert gc.isenabled()


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
