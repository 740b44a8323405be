"""`app.http.heads`: headers as they are written."""

from app.http.heads import Again, written


def test_each_header_has_its_line() -> None:
    """With its end."""
    assert written([(b"date", b"now"), (b"server", b"x")]) == b"date: now\r\nserver: x\r\n"


def test_another_list_is_written_anew() -> None:
    """Also one that comes back."""
    again, old, new = Again(), [(b"date", b"then")], [(b"date", b"now")]

    assert [again.written(each) for each in (old, old, new, old)] == [
        b"date: then\r\n",
        b"date: then\r\n",
        b"date: now\r\n",
        b"date: then\r\n",
    ]


def test_the_same_list_is_written_once() -> None:
    """As it is made anew whenever it changes."""
    again, headers = Again(), [(b"date", b"now")]

    assert again.written(headers) is again.written(headers)
