//! Tests of tool definitions.

use super::*;

#[test]
fn names_may_not_break_the_syntax_of_calls() {
    let long = "x".repeat(NAME_MAX);
    for name in ["f", "web.search", "mcp/server-1:tool_2", "große_суммы", &long] {
        assert!(is_name(name), "{name}");
    }
    let too_long = "x".repeat(NAME_MAX + 1);
    for name in ["", "a b", "a\"b", "a\\b", "a>b", "a\nb", "a{", "a[b]", "｜a", &too_long] {
        assert!(!is_name(name), "{name}");
    }
}
