"""Which addresses may be called."""

from __future__ import annotations

import ipaddress

import pytest

from oncue.addresses import NoHost, is_allowed, is_nowhere, spelled_addresses
from worker.egress import EgressRefused, parse_target

FORBIDDEN = [
    "0.0.0.0",
    "0.1.2.3",
    "10.1.2.3",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "127.255.255.255",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.7",
    "203.0.113.9",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::8.8.8.8",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "::ffff:0:7f00:1",
    "64:ff9b::7f00:1",
    "64:ff9b::808:808",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:10::1",
    "2001:20::1",
    "2001:db8::1",
    "2002:7f00:1::1",
    "2002:808:808::1",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
]
PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "93.184.215.14",
    "100.63.255.255",
    "100.128.0.0",
    "126.255.255.255",
    "128.0.0.0",
    "168.63.129.15",
    "168.63.129.17",
    "172.15.255.255",
    "172.32.0.0",
    "192.0.1.0",
    "198.17.255.255",
    "198.20.0.0",
    "223.255.255.255",
    "2606:4700:4700::1111",
    "2001:4860:4860::8888",
    "2a00:1450:4001:81b::200e",
]


@pytest.mark.parametrize("address", FORBIDDEN)
def test_inner_and_special_addresses_are_forbidden(address: str) -> None:
    assert not is_allowed(ipaddress.ip_address(address), ())


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_allowed(ipaddress.ip_address(address), ())


def test_an_allowed_network_opens_itself_and_no_other() -> None:
    allowed = [ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("fd00::/8")]
    assert is_allowed(ipaddress.ip_address("10.1.2.3"), allowed)
    assert is_allowed(ipaddress.ip_address("fd00::1"), allowed)
    assert not is_allowed(ipaddress.ip_address("192.168.0.1"), allowed)
    assert not is_allowed(ipaddress.ip_address("::ffff:10.1.2.3"), allowed)


@pytest.mark.parametrize(
    "url", ["http://a@b/", "http://a:b@c/", "http:///", "ftp://a/", "http://a b/", "http://a\\b/"]
)
def test_a_target_is_a_plain_http_url(url: str) -> None:
    with pytest.raises(EgressRefused):
        parse_target(url)


@pytest.mark.parametrize(
    "host", ["example.com", "example.com.", "my_host", "é.example", "1e3", "-"]
)
def test_a_name_is_no_address_and_may_be_called(host: str) -> None:
    assert spelled_addresses(f"http://{host}/") == ()
    assert parse_target(f"http://{host}/").host


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.", "a.localhost", "localhost:80"])
def test_localhost_is_both_of_its_addresses(host: str) -> None:
    assert [str(one) for one in spelled_addresses(f"http://{host}/")] == ["127.0.0.1", "::1"]


@pytest.mark.parametrize(
    "host",
    ["256.1.1.1", "1.2.3.4.5", "4294967296", "08", "a..b", ".a", "a.0x1f", "%61", "[v1.x]", "a*"],
)
def test_a_host_that_can_be_nothing_has_one_reading_for_all(host: str) -> None:
    with pytest.raises(NoHost):
        spelled_addresses(f"http://{host}/")
    with pytest.raises(EgressRefused):
        parse_target(f"http://{host}/")


@pytest.mark.parametrize(
    ("address", "nowhere"),
    [
        *(("0.0.0.0", True), ("224.0.0.1", True), ("255.255.255.255", True), ("::", True)),
        *(("ff02::1", True), ("::ffff:224.0.0.1", True), ("127.0.0.1", False), ("::1", False)),
        *(("10.0.0.1", False), ("169.254.169.254", False), ("fd00::1", False), ("1.1.1.1", False)),
    ],
)
def test_some_addresses_are_nobodys_in_any_network(address: str, nowhere: bool) -> None:
    assert is_nowhere(ipaddress.ip_address(address)) is nowhere
