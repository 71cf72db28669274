//! Compares the texts rendered from templates with those that Jinja2 renders
//! (`tests/data/jinja/renderings.jsonl`), and checks the rendering limits.

use super::error::JinjaErrorKind;
use super::{JinjaTemplate, RenderLimits};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// Line 1: the template variables. Each other line: a template and its expected text.
const RENDERINGS: &str = include_str!("../../../tests/data/jinja/renderings.jsonl");

const LIMITS: RenderLimits =
    RenderLimits { instructions: 500_000, output_bytes: 1 << 20, value_bytes: 64 << 20 };

fn render(template: &str, variables: &Map<String, Value>) -> Result<String, JinjaErrorKind> {
    let rendered = JinjaTemplate::compile(template)
        .and_then(|template| template.render(variables, LIMITS, str::to_owned));
    rendered.map_err(|error| error.kind())
}

#[test]
fn renderings_equal_those_of_jinja2() {
    let mut lines = RENDERINGS.lines();
    let variables = lines.next().and_then(|line| serde_json::from_str(line).ok()).unwrap();
    let (mut count, mut differences) = (0, Vec::new());
    for line in lines {
        let (template, expected): (String, Option<String>) = serde_json::from_str(line).unwrap();
        count += 1;
        let rendered = render(&template, &variables);
        if rendered.as_ref().ok() != expected.as_ref() {
            differences
                .push(format!("{template}\n  expected {expected:?}\n  rendered {rendered:?}"));
        }
    }
    assert!(count > 500);
    assert!(differences.is_empty(), "{}:\n{}", differences.len(), differences.join("\n"));
}

#[test]
fn sizes_and_nesting_are_limited() {
    let cases = [
        ("{{ 'x' * 1000000000 }}", JinjaErrorKind::Memory),
        ("{{ [0] * 1000000000 }}", JinjaErrorKind::Memory),
        ("{{ 'x'.ljust(1000000000) }}", JinjaErrorKind::Memory),
        ("{{ '%1000000000d' % 1 }}", JinjaErrorKind::Memory),
        ("{{ '%.1000000000f' % 1 }}", JinjaErrorKind::Memory),
        ("{{ '{:1000000000}'.format(1) }}", JinjaErrorKind::Memory),
        ("{{ 'x'|indent(1000000000) }}", JinjaErrorKind::Memory),
        ("{{ [1]|tojson(indent=1000000000) }}", JinjaErrorKind::Memory),
        ("{{ [1]|batch(1000000000, 1)|list }}", JinjaErrorKind::Memory),
        ("{{ 2 ** 10000000 }}", JinjaErrorKind::Memory),
        ("{{ range(1000000000) }}", JinjaErrorKind::Overflow),
        (
            "{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            JinjaErrorKind::Memory,
        ),
        (
            "{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s.replace('x', 'xxxx') %}{% endfor %}",
            JinjaErrorKind::Memory,
        ),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", JinjaErrorKind::Depth),
        ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", JinjaErrorKind::Depth),
        (
            "{% set ns = namespace(l=[]) %}{% for i in range(1000) %}{% set ns.l = [ns.l] %}{% endfor %}",
            JinjaErrorKind::Depth,
        ),
        (
            "{% set ns = namespace(l=[]) %}{% for i in range(1000) %}{% set ns.l = ns.l|map('string') %}{% endfor %}",
            JinjaErrorKind::Depth,
        ),
        (
            "{% set ns = namespace(l=[]) %}{% for i in range(1000) %}{% set ns.l = [1]|map('default', ns.l) %}{% endfor %}",
            JinjaErrorKind::Depth,
        ),
        ("{% set ns = namespace() %}{% set ns.n = ns %}{{ ns }}", JinjaErrorKind::Depth),
        (
            "{% set ns = namespace(l=[1]) %}{% for i in range(100) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
            JinjaErrorKind::Fuel,
        ),
        (
            "{% set ns = namespace(l=(1,)) %}{% for i in range(100) %}{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ {ns.l: 1} }}",
            JinjaErrorKind::Memory,
        ),
        (
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            JinjaErrorKind::Fuel,
        ),
        (
            "{% for a in range(99999) %}{{ 'abcdefghijklmnopqrstuvwxyz' }}{% endfor %}",
            JinjaErrorKind::Output,
        ),
    ];
    for (template, kind) in cases {
        assert_eq!(render(template, &Map::new()), Err(kind), "{template}");
    }
    let deep = format!("{{{{ {}1{} }}}}", "(".repeat(5_000), ")".repeat(5_000));
    assert_eq!(render(&deep, &Map::new()), Err(JinjaErrorKind::Syntax));
    let long = format!("{{{{ 1{} }}}}", " + 1".repeat(5_000));
    assert_eq!(render(&long, &Map::new()), Err(JinjaErrorKind::Syntax));
    let blocks = "{% if 1 %}".repeat(5_000);
    assert_eq!(render(&blocks, &Map::new()), Err(JinjaErrorKind::Syntax));
}

/// A long chain of namespaces is dropped without one recursive call per namespace.
#[test]
fn long_chains_of_namespaces_are_dropped() {
    let chain = "{% set ns = namespace() %}{% for i in range(50000) %}\
                 {% set ns.n = namespace(n=ns.n) %}{% endfor %}x";
    assert_eq!(render(chain, &Map::new()).as_deref(), Ok("x"));
}

#[test]
fn errors_name_their_line() {
    let error = |template: &str| {
        let compiled = JinjaTemplate::compile(template);
        let rendered = compiled.and_then(|t| t.render(&Map::new(), LIMITS, str::to_owned));
        rendered.unwrap_err().to_string()
    };
    assert_eq!(error("a\n{{ x.y }}"), "'x' is undefined (line 2)");
    assert_eq!(
        error("a\n\n{% if %}"),
        "Expected an expression, got 'end of statement block' (line 3)"
    );
    assert_eq!(
        error("{% set x = {} %}\n{{ x.y.z }}"),
        "'dict object' has no attribute 'y' (line 2)"
    );
}

#[test]
fn time_is_formatted() {
    assert_eq!(render("{{ strftime_now('%Y') }}", &Map::new()).as_deref(), Ok("%Y"));
}

/// Parts of random templates.
fn fragment() -> impl Strategy<Value = String> {
    let parts = prop::sample::select(vec![
        "{{",
        "}}",
        "{%",
        "%}",
        "{#",
        "#}",
        "-",
        "+",
        " ",
        "\n",
        "for",
        " in ",
        "if ",
        "else",
        "endif",
        "endfor",
        "set ",
        "macro ",
        "m",
        "x",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        ":",
        ",",
        "|",
        ".",
        "'",
        "\"",
        "\\",
        "%s",
        "1",
        "99999999999999999999",
        "1.5",
        "~",
        "*",
        "**",
        "//",
        "%",
        "==",
        "<",
        "not ",
        "is ",
        "none",
        "range(9)",
        "loop.last",
        "|list",
        "|map('upper')",
        "|tojson(indent=2)",
        ".split()",
        ".format(x)",
        "{% endmacro %}",
        "namespace(a=x)",
        "raw",
        "endraw",
        "é",
        "😀",
        "[::-1]",
        "recursive",
        "call ",
        "endcall",
        "break",
        "|sort",
    ]);
    prop::collection::vec(parts, 0..24).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn random_templates_do_not_panic(text in fragment()) {
        let variables = json!({"x": "a é", "m": [1, {"b": null}, 2.5]});
        let _ = render(&text, variables.as_object().unwrap());
        let _ = render(&format!("{{{{ {text} }}}}"), variables.as_object().unwrap());
    }

    #[test]
    fn random_formats_do_not_panic(spec in "[<>^=+ #0-9,_.a-zA-Z%{}!:]{0,8}", number in any::<f64>()) {
        let variables = json!({"spec": spec, "f": number, "i": number as i64});
        let template = "{{ ('%' ~ spec)|format(f) }}";
        let _ = render(template, variables.as_object().unwrap());
        for value in ["f", "i", "spec"] {
            let template = format!("{{{{ ('{{:' ~ spec ~ '}}').format({value}) }}}}");
            let _ = render(&template, variables.as_object().unwrap());
        }
    }
}
