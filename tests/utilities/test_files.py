from lightning_fedstop.utilities.files import atomic_file


def test_the_file_is_whole_or_what_it_was(tmp_path):
    path = tmp_path / "file"
    with atomic_file(path) as temporary:
        temporary.write_text("one")
        assert not path.exists()
    assert path.read_text() == "one"
    file = atomic_file(path)
    file.__enter__().write_text("half")
    file.__exit__(KeyError, KeyError(), None)
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]
