"""What is written to gs:// and s3:// comes back byte for byte; what tests find there says something about jaxtrain."""

import pytest
from store_servers import BUCKET, environment, gs_server, needs_stores, s3_server

from jaxtrain.checkpoint import remote
from jaxtrain.checkpoint.remote import RemotePath

pytestmark = [pytest.mark.xdist_group("stores")]


@needs_stores
def test_a_file_comes_back_whatever_its_last_bytes_are(tmp_path, monkeypatch):
    sent, got = tmp_path / "sent", tmp_path / "got"
    with s3_server() as s3, gs_server() as gs:
        for name, value in environment(s3.address, gs.address).items():
            monkeypatch.setenv(name, value)
        # A client that another test left in this process talks to the servers of that test.
        monkeypatch.setattr(remote, "_client", remote._client.__wrapped__)
        for scheme in ("s3", "gs"):
            place = RemotePath(f"{scheme}://{BUCKET}/a")
            for end in (b"\r", b"\n", b"\r\n", b"\r\r\n", b"", b"\0"):
                content = b"\x93 of a manifest" + end
                sent.write_bytes(content)
                place.upload(sent, lambda count: None)
                place.download(got, lambda count: None)
                assert got.read_bytes() == content
                place.write_bytes(content)
                assert place.read_bytes() == content
