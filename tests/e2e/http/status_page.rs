//! The status page at `/` and the data that its script reads.

use crate::http_client::get;
use crate::test_server::{ServerSetup, TestServer};
use serde_json::Value;
use std::collections::BTreeSet;

/// Names that follow `prefix` in `text`, such as `model` in `stats.model`.
fn members<'a>(text: &'a str, prefix: &str) -> BTreeSet<&'a str> {
    let name = |rest: &'a str| {
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        &rest[..end.unwrap_or(rest.len())]
    };
    text.split(prefix).skip(1).map(name).collect()
}

#[test]
fn status_page_reads_fields_of_the_loads_route() {
    let server = TestServer::start(&ServerSetup::default());
    let page = get(server.address, "/");
    assert_eq!(page.header("content-type"), Some("text/html; charset=utf-8"));
    let page = String::from_utf8(page.body).unwrap();
    let loads = get(server.address, "/v1/loads?include=steps").json();
    let has = |value: &Value, names: &BTreeSet<&str>| {
        for name in names {
            assert!(value.get(name).is_some(), "{name}: {value}");
        }
    };
    let read = members(&page, "stats.");
    assert!(["model", "devices", "uptime_s"].iter().all(|name| read.contains(name)), "{read:?}");
    has(&loads, &read);
    has(&loads["loads"][0], &members(&page, " l."));
}

/// The chart is readable without the numbers in the tiles: both axes have labels with values.
#[test]
fn axes_of_the_status_page_are_labelled() {
    let server = TestServer::start(&ServerSetup::default());
    let page = String::from_utf8(get(server.address, "/").body).unwrap();
    for id in ["rate-top", "rate-half", "model", "devices", "uptime"] {
        assert!(page.contains(&format!("id=\"{id}\"")), "no element {id}");
        assert!(page.contains(&format!("show('{id}', ")), "element {id} is not filled");
    }
    assert!(["120 s ago", "60 s ago", "now"].iter().all(|label| page.contains(label)));
}
