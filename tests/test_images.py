"""Pictures from users: what is read, from where, and what is refused before it costs anything."""

import base64
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import picture
from PIL import Image

from teachvllm.config import MultiModalConfig
from teachvllm.multimodal.images import (
    Download,
    MediaReader,
    check_size,
    decode_image,
    hash_of,
    resolve_host,
)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    held = BytesIO()
    image.save(held, kind, **options)
    return held.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_head(width: int, height: int, *others: bytes) -> bytes:
    "A PNG that says to be of that size, and has hardly any pixels."
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [chunk(b"IHDR", size), *others, chunk(b"IDAT", zlib.compress(bytes(1000)))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + chunk(b"IEND", b"")


def jpeg_head(width: int, height: int) -> bytes:
    data = bytearray(file_of(picture(16, 16), "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def gif_head(width: int, height: int) -> bytes:
    data = bytearray(file_of(picture(16, 16).convert("P"), "GIF"))
    size = struct.pack("<HH", width, height)
    data[6:10] = size
    frame = data.index(struct.pack("<BHHHH", 0x2C, 0, 0, 16, 16))
    data[frame + 5 : frame + 9] = size
    return bytes(data)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64," + base64.b64encode(data).decode()


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"></svg>'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
TEXT_BOMB = chunk(b"zTXt", b"Comment\x00\x00" + zlib.compress(bytes(2**27)))
ARRAY = np.zeros((8, 9, 3), np.uint8)
# what is given -> words of the refusal
BAD: dict[str, tuple[Any, str]] = {
    "bomb": (png_head(20000, 20000), "exceed"),
    "bomb of zeros": (png_head(2**31 - 1, 2**31 - 1), "exceed"),
    "large JPEG": (jpeg_head(65500, 65500), "exceed"),
    "large GIF": (gif_head(65535, 65535), "exceed"),
    "just too large": (png_head(13378, 13378), "exceed"),
    "compressed comment": (png_head(8, 8, TEXT_BOMB), "Failed to load image"),
    "1 x 100,000": (png_head(1, 100_000), "absolute aspect ratio must be smaller than 200"),
    "100,000 x 1": (Image.new("RGB", (100_000, 1)), "smaller than 200, got 100000.0"),
    "long array": (np.zeros((3, 1, 5000), np.uint8), "aspect ratio"),
    "broadcast array": (np.broadcast_to(np.uint8(0), (20000, 20000, 3)), "VLLM_MAX_IMAGE_PIXELS"),
    "no pixels": (np.zeros((0, 9, 3), np.uint8), "there are no pixels"),
    "no width": (png_head(0, 5), "Failed to load image|no pixels"),
    "empty": (b"", "Failed to load image"),
    "text": (b"this is not a picture", "Failed to load image: cannot identify"),
    "HTML": (b"<!doctype html><html><body>404</body></html>", "Failed to load image"),
    "SVG": (SVG, "SVG"),
    "SVG with a head": (b'<?xml version="1.0"?>\n' + SVG, "SVG"),
    "SVG in a URL": (data_url(SVG, "image/svg+xml"), "SVG"),
    "EPS": (EPS, "cannot identify"),
    "PDF": (b"%PDF-1.7\n%%EOF", "cannot identify"),
    "half a PNG": (file_of(picture(64, 64))[:900], "Failed to load image"),
    "half a JPEG": (file_of(picture(64, 64), "JPEG")[:700], "Failed to load image"),
    "half a WEBP": (file_of(picture(64, 64), "WEBP")[:300], "Failed to load image"),
    "head of a PNG": (file_of(picture(64, 64))[:20], "Failed to load image"),
    "pixels that are none": (png_head(64, 64), "Failed to load image"),
    "NaN": (np.full((4, 4), np.nan), "from 0 to 255"),
    "infinity": (np.full((4, 4), np.inf), "from 0 to 255"),
    "negative": (np.full((4, 4), -1), "from 0 to 255"),
    "16 bits": (np.full((4, 4), 300), "from 0 to 255"),
    "booleans": (np.ones((4, 4), bool), "numbers, not bool"),
    "complex": (np.ones((4, 4), complex), "numbers, not complex"),
    "texts": (np.array([["a", "b"]]), "numbers, not|could not convert|from 0"),
    "five channels": (np.zeros((6, 7, 5), np.uint8), r"not \[6, 7, 5\]"),
    "a row": (np.zeros(7, np.uint8), r"not \[7\]"),
    "a film": (np.zeros((2, 4, 4, 3), np.uint8), "channels first or last"),
    "a number": (7, "not int"),
    "None": (None, "not NoneType"),
    "a dict": ({"url": "x"}, "not dict"),
    "not base64": ("data:image/png;base64,@@@", "not valid base64"),
    "padding": ("data:image/png;base64,abcde", "not valid base64"),
    "plain data": ("data:image/png,abc", "Only base64 data URLs"),
    "no data": ("data:image/png;base64,", "Failed to load image"),
    "data without a comma": ("data:image/png;base64", "Only base64"),
    "ftp": ("ftp://example.com/a.png", "must be either a HTTP, data or file URL"),
    "a local file": ("/etc/passwd", "Cannot load local files without"),
    "a path": (Path("/etc/passwd"), "Cannot load local files without"),
    "a file URL": ("file:///etc/passwd", "Cannot load local files without"),
    "another machine": ("file://server/etc/passwd", "of this machine"),
    "no host": ("http:///a.png", "Invalid HTTP URL"),
    "loopback": ("http://127.0.0.1/a.png", "private address, 127.0.0.1"),
    "localhost": ("http://localhost:1/a.png", "private address"),
    "as a number": ("http://2130706433/a.png", "private address, 127.0.0.1"),
    "version 6": ("http://[::1]/a.png", "private address, ::1"),
    "wrapped": ("http://[::ffff:127.0.0.1]/a.png", "private address"),
    "translated": ("http://[64:ff9b::7f00:1]/a.png", "private address"),
    "local to a site": ("http://[fec0::1]/a.png", "private address"),
    "metadata": ("http://169.254.169.254/latest/meta-data", "private address"),
    "this host": ("https://0.0.0.0/a.png", "private address"),
    "intranet": ("https://10.1.2.3/a.png", "private address"),
    "no such name": ("https://no-such-host.invalid/a.png", "cannot find the URL's host"),
    "a name too long": ("https://" + "a" * 300 + ".com/a.png", "cannot find the URL's host"),
    "a broken port": ("http://127.0.0.1:99999999/a.png", "[Pp]ort"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    source, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        MediaReader().read(source)


def all_bad() -> None:
    "In a process of its own: what all refusals together have taken of memory."
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for source, _ in BAD.values():
        try:
            MediaReader().read(source)
        except ValueError:
            continue
        raise AssertionError(source)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_refusals_take_no_memory() -> None:
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}:{here.parent}"}
    code = "import test_images; test_images.all_bad()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 150_000  # KiB; one of the bombs would be a GB


def test_the_limit_is_vllms_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    small = file_of(picture(20, 20))
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "399")
    says = r"Image dimensions 20x20 \(400 pixels\) exceed the maximum of 399 pixels\. Set VLLM_MAX"
    for source in (small, picture(20, 20), np.asarray(picture(20, 20))):
        with pytest.raises(ValueError, match=says):
            MediaReader().read(source)
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "0")
    check_size(10**6, 10**6)
    monkeypatch.delenv("VLLM_MAX_IMAGE_PIXELS")
    check_size(13377, 13377)
    check_size(1, 200)
    with pytest.raises(ValueError, match="got 201"):
        check_size(201, 1)


# What is read


def same(one: Image.Image, other: Image.Image) -> bool:
    return one.mode == other.mode and np.array_equal(np.asarray(one), np.asarray(other))


def test_one_picture_in_many_forms(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    image = picture(30, 20)
    array = np.asarray(image)
    data = file_of(image)
    (tmp_path / "a picture.png").write_bytes(data)
    reader = MediaReader(str(tmp_path))
    forms = [
        image,
        array,
        array.transpose(2, 0, 1),
        array.astype(np.int64),
        array.astype(np.float32),
        array / 255.0,
        torch.from_numpy(array.copy()).permute(2, 0, 1),
        data,
        file_of(image, "WEBP", lossless=True),
        file_of(image, "BMP"),
        file_of(image, "TIFF"),
        data_url(data),
        data_url(data).replace("+", "%2B"),
        data_url(data, "application/octet-stream"),
        tmp_path / "a picture.png",
        str(tmp_path / "a picture.png"),
        f"file://{tmp_path}/a%20picture.png",
        f"FILE://localhost{tmp_path}/a%20picture.png",
    ]
    for form in forms:
        assert same(reader.read(form), image)


def test_other_colours() -> None:
    image = picture(30, 20)
    grey = image.convert("L")
    assert same(MediaReader().read(np.asarray(grey)), grey.convert("RGB"))
    assert same(MediaReader().read(np.asarray(grey)[:, :, None]), grey.convert("RGB"))
    assert same(MediaReader().read(image.convert("CMYK")), image.convert("CMYK").convert("RGB"))
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    for form in (deep, file_of(deep)):
        assert same(MediaReader().read(form), grey.convert("RGB"))
    clear = image.convert("RGBA")
    clear.putalpha(0)
    assert MediaReader().read(file_of(clear)).getextrema() == ((255, 255),) * 3
    # as transformers converts a picture that is one already
    assert same(MediaReader().read(clear), image)
    frames = [picture(30, 20, seed).convert("P") for seed in (1, 2)]
    film = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert same(decode_image(film), frames[0].convert("RGB"))


def test_a_camera_held_upright() -> None:
    image = picture(30, 20)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by 90 degrees
    assert same(decode_image(file_of(image, exif=exif)), image.transpose(Image.ROTATE_270))


def test_hashes_tell_contents_apart() -> None:
    image = picture(30, 20)
    other = image.copy()
    other.putpixel((29, 19), (1, 2, 3))
    rows = np.asarray(image)
    things = [
        (image,),
        (other,),
        (image.convert("L"),),
        (image.transpose(Image.ROTATE_90),),
        (Image.frombytes("RGB", (20, 30), image.tobytes()),),  # the same bytes in another shape
        (rows,),
        (rows.astype(np.int64),),
        (rows.reshape(30, 20, 3),),
        (image, {"a": 1}),
        (image, {"a": 1.0}),
        (image, {"b": 1}),
        (image, {"a": [1, 23]}),
        (image, {"a": [12, 3]}),
        (image, {"a": True}),
        (image, {"a": "1"}),
        ("ab", "c"),
        ("a", "bc"),
        (["ab", "c"],),
        (b"ab", "c"),
    ]
    assert len({hash_of(*one) for one in things}) == len(things)
    assert hash_of(image, {"a": 1, "b": 2}) == hash_of(image.copy(), {"b": 2, "a": 1})
    tall = picture(40, 1500)
    changed = tall.copy()
    changed.putpixel((0, 1499), (1, 2, 3))
    assert hash_of(tall) == hash_of(tall.copy()) != hash_of(changed)


# Files


def test_files_are_read_below_one_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "in and out"
    inside.mkdir()
    outside.mkdir()
    for folder in (inside, outside):
        (folder / "a.png").write_bytes(file_of(picture()))
    (inside / "link.png").symlink_to(outside / "a.png")
    (inside / "circle").symlink_to(inside / "circle")
    os.mkfifo(inside / "pipe")
    reader = MediaReader(str(inside))
    assert reader.read(inside / "a.png").size == (70, 45)
    assert reader.read(inside / ".." / "in" / "a.png").size == (70, 45)
    says = "must be a subpath of `--allowed-local-media-path`"
    for path in (outside / "a.png", inside / ".." / "in and out" / "a.png", inside / "link.png"):
        for form in (path, str(path), f"file://{path}"):
            with pytest.raises(ValueError, match=says):
                reader.read(form)
    for name in ("pipe", "nothing.png", "circle", "a\0.png", "a" * 5000):
        with pytest.raises(ValueError, match=r"there is no file|cannot read|null"):
            reader.read(inside / name)
    with pytest.raises(ValueError, match=says):
        reader.read(inside)
    (inside / "large.png").write_bytes(bytes(1000))
    with pytest.raises(ValueError, match="more than 999 bytes"):
        MediaReader(str(inside), Download(max_bytes=999)).read(inside / "large.png")
    with pytest.raises(ValueError, match="more than 999 bytes"):
        MediaReader(download=Download(max_bytes=999)).read(data_url(bytes(2000)))


# The network


class Answers(BaseHTTPRequestHandler):
    "What a server may answer, by the path."

    asked: list[str] = []

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, status: int, data: bytes = b"", **headers: Any) -> None:
        self.send_response(status)
        headers.setdefault("Content_Length", len(data))
        for name, value in headers.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(data)

    def drip(self, piece: bytes, times: int, seconds: float) -> None:
        for _ in range(times):
            self.wfile.write(piece)
            self.wfile.flush()
            time.sleep(seconds)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        port = self.server.server_address[1]
        image = file_of(picture())
        with_length = {"Content_Length": 10**9}
        answers: dict[str, Callable[[], Any]] = {
            "/a.png": lambda: self.send(200, image),
            "/a%20b.png?size=1&x=2": lambda: self.send(200, image),
            "/moved": lambda: self.send(302, Location="/a.png"),
            "/moved/far": lambda: self.send(301, Location=f"http://127.0.0.1:{port}/moved"),
            "/loop": lambda: self.send(307, Location="/loop"),
            "/to/name": lambda: self.send(302, Location=f"http://localhost:{port}/a.png"),
            "/to/metadata": lambda: self.send(302, Location="http://169.254.169.254/latest"),
            "/to/file": lambda: self.send(302, Location="file:///etc/passwd"),
            "/to/nowhere": lambda: self.send(302),
            "/missing": lambda: self.send(404, b"not here"),
            "/teapot": lambda: self.send(418),
            "/page": lambda: self.send(200, b"<html></html>"),
            "/short": lambda: self.send(200, image[:50], Content_Length=len(image)),
            "/long": lambda: self.send(200, **with_length),
            "/broken": lambda: self.wfile.write(b"what is this\r\n\r\n"),
        }
        with_no_end = {"/endless": (b"x" * 2**16, 10**6, 0.0), "/slow": (b"x", 100, 0.05)}
        if self.path in with_no_end:
            try:
                self.send(200, Content_Length=None)
                self.drip(*with_no_end[self.path])
            except OSError:
                self.close_connection = True
        elif self.path == "/slow/head":
            try:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                self.drip(b"A: b\r\n", 100, 0.05)
            except OSError:
                self.close_connection = True
        else:
            answers[self.path]()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


READER = MediaReader(download=Download(("127.0.0.1",), timeout=5, max_bytes=2**20))


def test_pictures_are_downloaded(address: str) -> None:
    for path in ("/a.png", "/a%20b.png?size=1&x=2", "/moved", "/moved/far"):
        assert READER.read(address + path).size == (70, 45)
    assert Answers.asked[-3:] == ["/moved/far", "/moved", "/a.png"]


WRONG_ANSWERS = {
    "/loop": "more than 5 redirects",
    "/to/name": "must be from one of the allowed domains: .* Input URL domain: 'localhost'",
    "/to/metadata": "allowed domains",
    "/to/file": "Invalid HTTP URL",
    "/to/nowhere": "says not where",
    "/missing": "answered 404",
    "/teapot": "answered 418",
    "/page": "Failed to load image",
    "/short": "the connection ended before",
    "/long": "more than 1048576 bytes",
    "/endless": "more than 1048576 bytes",
    "/broken": "cannot read",
}


@pytest.mark.parametrize("path", WRONG_ANSWERS)
def test_wrong_answers(address: str, path: str) -> None:
    with pytest.raises(ValueError, match=WRONG_ANSWERS[path]):
        READER.read(address + path)


@pytest.mark.parametrize("path", ["/slow", "/slow/head"])
def test_a_slow_server_is_left(address: str, path: str) -> None:
    "Though each single byte comes in time."
    reader = MediaReader(download=Download(("127.0.0.1",), timeout=0.3))
    with pytest.raises(ValueError, match="cannot read"):
        reader.read(address + path)


def test_a_server_that_does_not_speak_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/a.png"
        for scheme in (url, url.replace("http", "https")):
            with pytest.raises(ValueError, match="cannot read"):
                MediaReader(download=Download(("127.0.0.1",), timeout=0.2)).read(scheme)
    with pytest.raises(ValueError, match="cannot read"):
        READER.read(url)  # nobody listens


def test_several_are_read_at_a_time() -> None:
    "In order; the third is read while the first is waited for, or the first never comes."
    third = threading.Event()

    def download(url: str) -> bytes:
        if url.endswith("0"):
            assert third.wait(60)
        if url.endswith("2"):
            third.set()
        return url.encode()

    reader = MediaReader(download=SlowDownload(download, timeout=60))
    urls = [f"http://a/{i}" for i in range(9)]
    assert list(reader.fetch_all([*urls, b"bytes", None])) == [
        *(url.encode() for url in urls),
        b"bytes",
        None,
    ]
    assert list(reader.fetch_all([])) == []


def test_a_prompt_waits_no_longer_than_for_one_image() -> None:
    "Though each of its images comes in time; what is not read yet is not begun."
    asked = []

    def download(url: str) -> bytes:
        asked.append(url)
        time.sleep(0.1)
        return b""

    reader = MediaReader(download=SlowDownload(download, timeout=0.15))
    with pytest.raises(ValueError, match="more than 0.15 seconds.*VLLM_IMAGE_FETCH_TIMEOUT"):
        list(reader.fetch_all([f"http://a/{i}" for i in range(100)]))
    assert len(asked) < 30


class SlowDownload(Download):
    "A download whose answers a test makes."

    def __init__(self, answer: Callable[[str], bytes], timeout: float):
        super().__init__(timeout=timeout)
        object.__setattr__(self, "answer", answer)

    def __call__(self, url: str) -> bytes:
        return self.answer(url)  # type: ignore[attr-defined, no-any-return]


def test_private_addresses(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = len(Answers.asked)
    for reader in (MediaReader(), MediaReader.from_config(MultiModalConfig())):
        with pytest.raises(ValueError, match="list it in allowed_media_domains"):
            reader.read(address + "/a.png")
    assert len(Answers.asked) == asked  # nothing was sent
    own = MediaReader.from_config(MultiModalConfig(allowed_media_domains=["127.0.0.1"]))
    assert own.read(address + "/a.png").size == (70, 45)
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    monkeypatch.setenv("VLLM_IMAGE_FETCH_TIMEOUT", "2.5")
    own = MediaReader.from_config(MultiModalConfig(allowed_media_domains=["127.0.0.1"]))
    assert own.download.timeout == 2.5
    with pytest.raises(ValueError, match="redirects are not followed"):
        own.read(address + "/moved")


def test_the_address_that_was_looked_at_is_the_one_that_is_used(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    "A name that has a public address when it is looked at, and a private one a moment later."
    answers = [["93.184.216.34"], ["127.0.0.1"]]
    calls: list[Any] = []

    def lookup(host: str, port: int, **_: Any) -> list[Any]:
        return [(0, 0, 0, "", (ip, port)) for ip in answers.pop(0)]

    def connect(target: Any, timeout: float) -> Any:
        calls.append(target)
        raise OSError("no network here")

    monkeypatch.setattr("socket.getaddrinfo", lookup)
    monkeypatch.setattr("socket.create_connection", connect)
    with pytest.raises(ValueError, match="no network here"):
        MediaReader().read("http://two-faced.example/a.png")
    assert calls == [("93.184.216.34", 80)] and len(answers) == 1
    answers[:] = [["93.184.216.34", "10.0.0.1"]]
    with pytest.raises(ValueError, match=r"private address, 10\.0\.0\.1"):
        resolve_host("two-faced.example", 80, trusted=False)
