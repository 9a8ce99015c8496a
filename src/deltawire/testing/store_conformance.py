"""A test of every promise of `deltawire.store.Store`. Subclass it in a test file, with a fixture that opens a location:

class TestMyStore(StoreConformance):
    @pytest.fixture
    def open_location(self, tmp_path):
        return lambda: MyStore(tmp_path)

    @pytest.fixture
    def open_location(self):  # or a service that has a URL; the tests leave their objects there
        url = f"s3://bucket/conformance/{uuid.uuid4().hex}"
        return lambda: open_store(url)
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta, timezone

import pytest

from ..errors import DataDamaged, LimitExceeded, ObjectExists, ObjectMissing, OutcomeUnknown, StoreError
from ..store import Buffer, Store, probe

LARGE = 20 * 1024 * 1024 + 7  # two pieces of any client's default size, and a last piece that is smaller


class StoreConformance:
    """Tests a store. A subclass defines the fixture `open_location`. Each call of it opens the same location, which is empty at first."""

    @pytest.fixture
    def open_location(self) -> Callable[[], Store]:
        raise NotImplementedError("a subclass must define open_location")

    @pytest.fixture
    def store(self, open_location: Callable[[], Store]) -> Iterator[Store]:
        with open_location() as store:
            yield store

    def test_it_passes_the_probe_and_is_left_empty(self, store: Store) -> None:
        probe(store)
        assert list(store.list("")) == []

    def test_what_was_put_is_read_back_by_others(self, store: Store, open_location: Callable[[], Store]) -> None:
        store.put("a/b/object", b"content")
        with open_location() as other:
            assert other.get("a/b/object", limit=7) == b"content"
            assert other.head("a/b/object").size == 7

    def test_a_put_replaces(self, store: Store) -> None:
        store.put("HEAD", b"a longer first one")
        store.put("HEAD", b"second")
        assert store.get("HEAD", limit=100) == b"second"

    @pytest.mark.parametrize("size", [0, 1, 4096])
    def test_small_objects_of_any_size_are_kept(self, store: Store, size: int) -> None:
        data = b"x" * size
        store.put("put", data, size=size)
        store.put_if_absent("created", data)
        assert store.get("put", limit=size) == store.get("created", limit=size) == data
        assert store.head("put").size == store.head("created").size == size
        for key in ("put", "created"):
            buffer = bytearray(size)
            store.read_into(key, memoryview(buffer))
            assert buffer == data

    def test_a_put_that_need_not_last_is_seen_at_once(self, store: Store, open_location: Callable[[], Store]) -> None:
        for data in (b"first", b"second"):
            store.put("HEAD", data, durable=False)
            with open_location() as other:
                assert other.get("HEAD", limit=100) == data

    def test_no_reader_sees_an_object_half_written(self, store: Store, open_location: Callable[[], Store]) -> None:
        size, versions = 300_000, 24
        store.put("object", bytes(size))
        is_over = threading.Event()

        def read() -> None:
            with open_location() as mine:
                while not is_over.is_set():
                    data = mine.get("object", limit=size)
                    assert data == data[:1] * size

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            try:
                for version in range(1, versions + 1):
                    store.put("object", bytes([version]) * size)
            finally:
                is_over.set()
            for reader in readers:
                reader.result()

    def test_buffers_of_every_kind_are_taken(self, store: Store) -> None:
        store.put("bytearray", bytearray(b"abc"))
        store.put("memoryview", memoryview(b"xabcx")[1:4])
        pieces: list[Buffer] = [b"a", bytearray(), memoryview(b"b"), b"c"]
        store.put("pieces", iter(pieces), size=3)
        store.put("nothing", iter([]))
        assert [store.get(key, limit=3) for key in ("bytearray", "memoryview", "pieces", "nothing")] == [b"abc", b"abc", b"abc", b""]

    def test_missing_objects_are_reported_as_missing(self, store: Store) -> None:
        store.put("folder/object", b"x")
        for key in ("nothing", "folder", "folder/nothing", "folder/object/below"):
            with pytest.raises(ObjectMissing):
                store.get(key, limit=10)
            with pytest.raises(ObjectMissing):
                store.head(key)
            with pytest.raises(ObjectMissing):
                store.read_into(key, memoryview(bytearray(1)))
            with pytest.raises(ObjectMissing):
                store.read_into(key, memoryview(bytearray(0)))

    def test_get_refuses_more_than_its_limit(self, store: Store) -> None:
        store.put("object", bytes(100))
        assert len(store.get("object", limit=100)) == 100
        with pytest.raises(LimitExceeded):
            store.get("object", limit=99)

    def test_create_refuses_a_name_that_exists_and_changes_nothing(self, store: Store) -> None:
        store.put_if_absent("created", b"first")
        store.put("put", b"first")
        for key in ("created", "put"):
            with pytest.raises(ObjectExists, match=key):
                store.put_if_absent(key, b"second")
            assert store.get(key, limit=10) == b"first"

    def test_create_works_again_after_a_deletion(self, store: Store) -> None:
        store.put_if_absent("object", b"first")
        store.delete(["object"])
        store.put_if_absent("object", b"second")
        assert store.get("object", limit=10) == b"second"

    def test_create_refuses_more_than_a_record(self, store: Store) -> None:
        store.put_if_absent("largest", bytes(64 * 1024))
        with pytest.raises(StoreError):
            store.put_if_absent("larger", bytes(64 * 1024 + 1))
        with pytest.raises(ObjectMissing):
            store.head("larger")

    def test_of_sixteen_creators_exactly_one_wins(self, store: Store, open_location: Callable[[], Store]) -> None:
        rounds, creators = 2, 16
        barrier = threading.Barrier(creators, timeout=60)

        def create(number: int) -> list[bool]:
            won = []
            try:
                with open_location() as mine:
                    for turn in range(rounds):
                        barrier.wait()
                        try:
                            mine.put_if_absent(f"race/{turn}", f"creator {number}".encode())
                            won.append(True)
                        except (ObjectExists, OutcomeUnknown):
                            won.append(False)
            except BaseException:
                barrier.abort()  # otherwise the others would wait for this one
                raise
            return won

        with ThreadPoolExecutor(creators) as pool:
            results = list(pool.map(create, range(creators)))
        for turn in range(rounds):
            content = store.get(f"race/{turn}", limit=100)
            winners = [f"creator {number}".encode() for number, won in enumerate(results) if won[turn]]
            assert winners in ([content], [])  # a winner whose answer was lost does not know it; two winners are never allowed
        assert any(any(won) for won in results)

    def test_large_objects_come_back_bit_for_bit(self, store: Store) -> None:
        data = _pattern(LARGE)
        store.put("whole", data, size=LARGE)
        store.put("pieces", (data[start : start + 3_000_001] for start in range(0, LARGE, 3_000_001)), size=LARGE)
        for key in ("whole", "pieces"):
            assert store.head(key).size == LARGE
            buffer = bytearray(LARGE)
            store.read_into(key, memoryview(buffer))
            assert buffer == data

    def test_ranges_are_exact(self, store: Store) -> None:
        data = _pattern(LARGE)
        store.put("object", data)
        for offset, size in ((0, 1), (1, 4095), (LARGE - 1, 1), (5_000_000, 15_000_000)):
            buffer = bytearray(size + 2)
            store.read_into("object", memoryview(buffer)[1:-1], offset=offset)
            assert buffer[1:-1] == data[offset : offset + size]
            assert buffer[0] == buffer[-1] == 0

    def test_typed_buffers_are_filled(self, store: Store) -> None:
        store.put("object", _pattern(64))
        buffer = bytearray(64)
        store.read_into("object", memoryview(buffer).cast("Q"))
        assert buffer == _pattern(64)

    @pytest.mark.parametrize(("size", "offset"), [(11, 0), (1, 10), (1, 1000), (LARGE, 0)])
    def test_a_range_past_the_end_is_damage(self, store: Store, size: int, offset: int) -> None:
        store.put("object", bytes(10))
        with pytest.raises(DataDamaged):
            store.read_into("object", memoryview(bytearray(size)), offset=offset)

    @pytest.mark.parametrize("size", [10, LARGE])
    def test_a_put_of_another_size_than_announced_leaves_nothing(self, store: Store, size: int) -> None:
        for announced in (size - 1, size + 1):
            with pytest.raises(StoreError):
                store.put("object", iter([bytes(size)]), size=announced)
        with pytest.raises(ObjectMissing):
            store.head("object")

    @pytest.mark.parametrize("size", [10, LARGE])
    def test_a_put_whose_source_fails_leaves_the_old_object(self, store: Store, size: int) -> None:
        store.put("object", b"old")

        def pieces() -> Iterator[bytes]:
            yield bytes(size)
            raise KeyError("the source failed")

        with pytest.raises(KeyError, match="the source failed"):
            store.put("object", pieces())
        assert store.get("object", limit=10) == b"old"

    def test_progress_adds_up(self, store: Store) -> None:
        put: list[int] = []
        store.put("object", iter([bytes(LARGE - 1), b"x"]), size=LARGE, progress=put.append)
        read: list[int] = []
        store.read_into("object", memoryview(bytearray(LARGE)), progress=read.append)
        assert sum(put) == sum(read) == LARGE

    def test_listings_are_in_order_of_keys(self, store: Store) -> None:
        keys = ["a", "a.b", "b/c", "b/d/e", "b0", "c/x", "cx", "d-e", "d.e", "Z"]
        for key in keys:
            store.put(key, key.encode())
        listed = list(store.list(""))
        assert [info.key for info in listed] == sorted(keys)
        assert [info.size for info in listed] == [len(key) for key in sorted(keys)]
        assert [info.key for info in store.list("b/")] == ["b/c", "b/d/e"]
        assert [info.key for info in store.list("nothing/")] == []

    def test_listings_begin_after_a_key_that_need_not_exist(self, store: Store) -> None:
        keys = [f"n/{number:03}" for number in range(0, 30, 2)]
        for key in [*keys, "m/1", "o/1"]:
            store.put(key, b"")
        assert [info.key for info in store.list("n/", after="n/010")] == [key for key in keys if key > "n/010"]
        assert [info.key for info in store.list("n/", after="n/011")] == [key for key in keys if key > "n/011"]
        assert [info.key for info in store.list("n/", after="m/1")] == keys
        assert [info.key for info in store.list("n/", after="n/028")] == []
        assert [info.key for info in store.list("n/", after="z")] == []

    def test_listings_longer_than_a_page_are_complete(self, store: Store) -> None:
        keys = [f"many/{number:05}" for number in range(1100)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: store.put(key, b""), keys))
        assert [info.key for info in store.list("many/")] == keys
        assert [info.key for info in store.list("many/", after=keys[4])] == keys[5:]
        assert next(store.list("many/")).key == keys[0]
        store.delete(keys)
        assert list(store.list("many/")) == []

    def test_deleting_is_complete_and_forgives_what_is_missing(self, store: Store) -> None:
        for key in ("a/1", "a/2", "b"):
            store.put(key, b"x")
        store.delete(["a/0", "a/1", "nothing", "a/1"])
        store.delete([])
        store.delete(["nothing"])
        assert [info.key for info in store.list("")] == ["a/2", "b"]

    def test_times_are_aware_and_do_not_fall(self, store: Store) -> None:
        store.put("first", b"x")
        store.put("second", b"x")
        first, second = store.head("first").modified, store.head("second").modified
        assert first.utcoffset() is not None
        assert second.astimezone(timezone.utc) - first.astimezone(timezone.utc) >= timedelta(0)
        # HTTP dates have whole seconds, listings may have more.
        assert abs(next(store.list("")).modified - first) < timedelta(seconds=1)

    @pytest.mark.parametrize(
        "key",
        [
            "",
            "/",
            "/a",
            "a/",
            "a//b",
            ".",
            "..",
            "a/..",
            "../a",
            "a/../b",
            "./a",
            "a/.hidden",
            "a\\b",
            "a\nb",
            "a\0b",
            "a b",
            "ä",
            "a%2fb",
            "x" * 600,
        ],
    )
    def test_hostile_keys_are_refused(self, store: Store, key: str) -> None:
        for attempt in (
            lambda: store.get(key, limit=1),
            lambda: store.head(key),
            lambda: store.read_into(key, memoryview(bytearray(1))),
            lambda: store.put_if_absent(key, b""),
            lambda: store.put(key, b""),
            lambda: store.delete([key]),
            lambda: store.get_if_changed(key, limit=1, tag=None),
            lambda: store.wait_for_change(key, limit=1, tag=None, timeout=60),
            lambda: store.doubt(key),
        ):
            with pytest.raises(StoreError) as raised:
                attempt()
            assert type(raised.value) is StoreError
        assert list(store.list("")) == []

    @pytest.mark.parametrize("prefix", ["/", "folder", "/a/", "a//", "../", "a/../", ".hidden/", "a b/"])
    def test_what_is_no_folder_cannot_be_listed(self, store: Store, prefix: str) -> None:
        with pytest.raises(StoreError):
            list(store.list(prefix))

    def test_errors_name_operation_key_and_store(self, store: Store) -> None:
        with pytest.raises(ObjectMissing) as raised:
            store.get("some/key", limit=1)
        for part in ("some/key", store.url):
            assert part in str(raised.value)
        assert any(word in str(raised.value) for word in ("reading", "get"))

    def test_many_threads_may_use_one_store(self, store: Store) -> None:
        def work(number: int) -> None:
            data = _pattern(1000 + number)
            store.put(f"thread/{number}", data)
            assert store.get(f"thread/{number}", limit=len(data)) == data
            buffer = bytearray(len(data))
            store.read_into(f"thread/{number}", memoryview(buffer))
            assert buffer == data

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(40)))
        assert len(list(store.list("thread/"))) == 40

    def test_an_object_is_read_again_only_if_it_has_changed(self, store: Store, open_location: Callable[[], Store]) -> None:
        tag: str | None = None
        for data in (b"first", b"other", b"", b"first", b"other"):  # two contents of one size, and contents that come back
            store.put("object", data)
            found = store.get_if_changed("object", limit=5, tag=tag)
            assert found is not None
            assert found[0] == data
            tag = found[1]
            with open_location() as other:
                assert other.get_if_changed("object", limit=5, tag=tag) is None
                assert other.wait_for_change("object", limit=5, tag=tag, timeout=0) is None
            again = store.get_if_changed("object", limit=5, tag=None)
            assert again == (data, tag)

    def test_looking_for_a_change_fails_like_reading(self, store: Store) -> None:
        store.put("object", bytes(100))
        for tag in (None, "x", '"x"', "0" * 64):
            found = store.get_if_changed("object", limit=100, tag=tag)
            assert found is not None
            assert found[0] == bytes(100)
            with pytest.raises(LimitExceeded):
                store.get_if_changed("object", limit=99, tag=tag)
            with pytest.raises(LimitExceeded):
                store.wait_for_change("object", limit=99, tag=tag, timeout=60)
            with pytest.raises(ObjectMissing):
                store.get_if_changed("missing", limit=1, tag=tag)
            with pytest.raises(ObjectMissing):
                store.wait_for_change("missing", limit=1, tag=tag, timeout=0.001)

    def test_whoever_waits_for_a_change_gets_it(self, store: Store, open_location: Callable[[], Store]) -> None:
        """Stores may wait or look once. Both find each change if the caller repeats the call."""
        answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        is_over = threading.Event()

        def follow() -> None:
            tag: str | None = None
            with open_location() as mine:
                while not is_over.is_set():
                    try:
                        found = mine.wait_for_change("object", limit=10, tag=tag, timeout=0.5)
                    except ObjectMissing:
                        found = None
                    if found is not None:
                        data, tag = found
                        answers.put(data)
                    else:
                        is_over.wait(0.005)

        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(follow)
            try:
                for number in range(8):
                    store.put("object", b"value %d" % number, durable=False)
                    assert answers.get(timeout=120) == b"value %d" % number
                store.delete(["object"])
                store.put("object", b"another")
                assert answers.get(timeout=120) == b"another"
            finally:
                is_over.set()
            following.result()

    def test_advice_for_callers_is_usable(self, store: Store) -> None:
        assert 1 <= store.streams <= 1024
        assert store.link is None or store.link.streams >= 1
        store.put("object", b"content")
        store.doubt("object")
        store.doubt("missing")
        assert store.get("object", limit=7) == b"content"

    def test_closing_twice_is_fine(self, open_location: Callable[[], Store]) -> None:
        store = open_location()
        store.close()
        store.close()


def _pattern(size: int) -> bytes:
    """Bytes that differ from part to part, so that parts in the wrong order show."""
    block = bytes(range(251))  # prime: no power of two repeats it
    return (block * (size // len(block) + 1))[:size]
