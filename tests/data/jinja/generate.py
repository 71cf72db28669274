"""Writes renderings.jsonl: templates with the text that Jinja2 renders as transformers runs it, or null for an error.

Run with Jinja2 3.1.6 under Python 3.11: python generate.py > renderings.jsonl
"""

import json

import jinja2
import jinja2.ext
import jinja2.sandbox


class AssistantTracker(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    @jinja2.pass_eval_context
    def _render(self, context, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[AssistantTracker, jinja2.ext.loopcontrols]
)
ENVIRONMENT.filters["tojson"] = tojson
ENVIRONMENT.globals["raise_exception"] = raise_exception

CONTEXT = {
    "messages": [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "What's the weather\nin Paris?", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris", "days": 2, "deep": {"a": [1, 2.5, True, None]}}}}
            ],
        },
        {"role": "tool", "content": "{\"t\": 21}", "tool_call_id": "c1"},
        {"role": "assistant", "content": "<think>\nwarm\n</think>\n\nIt is 21 °C."},
    ],
    "tools": None,
    "documents": None,
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "items": [{"n": 3, "s": "b"}, {"n": 1, "s": "B"}, {"n": 2, "s": "a"}],
    "d": {"b": 2, "a": 1, "C": 3},
    "s": "Hello, World",
    "n": 42,
    "f": 2.5,
    "lines": "one\n\n  two\nthree\n",
    "nested": {"items": [1, 2], "keys": "k", "x": {"y": {"z": "deep"}}},
}

VALUES = [
    "none", "true", "false", "0", "7", "-3", "2.5", "-0.5", "1e22", "1e-7", "100000000000000000000", "''", "'Hello World'",
    "'it\\'s'", "'a\"b\\'c'", "' x y '", "'tab\\tnl\\n'", "'é ß ǆ Σας'", "'42'", "'4.5'", "'0x1F'", "'<b>&</b>'", "'<i>'|safe",
    "[]", "[1, 2, 3]", "['b', 'A', 'c']", "[3, 1.5, true]", "[[1], [0, 5]]", "()", "(1,)", "(1, 'a', none)", "{}", "{'a': 1}",
    "{'b': [none, 'x'], 2: 2.0, 'a': {}}", "missing", "range(4)", "range(5, 0, -2)", "messages[0]", "d", "d.items()",
    "d.keys()", "namespace(a=1, b='x')",
]

FILTERS = [
    "abs", "batch(2)|list", "capitalize", "center(9)", "count", "default('D')", "default('D', true)", "dictsort", "e",
    "escape", "filesizeformat", "first", "float", "float(1.5)", "forceescape", "format", "indent", "int", "int(5)", "items|list",
    "join", "join(', ')", "last", "length", "list", "lower", "map('string')|list", "max", "min", "pprint", "reject|list",
    "replace('o', '0')", "reverse|list", "round", "round(1)", "safe", "select|list", "slice(2)|list", "sort", "string",
    "striptags", "sum", "title", "tojson", "tojson(indent=2)", "trim", "truncate(8)", "unique|list", "upper", "urlencode",
    "wordcount", "wordwrap(5)", "xmlattr", "attr('upper')", "list|tojson", "string|length",
]

TESTS = [
    "boolean", "callable", "defined", "divisibleby(2)", "eq(7)", "escaped", "even", "false", "filter", "float", "ge(2)", "gt(2)",
    "in([7, 'a', none])", "integer", "iterable", "le(2)", "lower", "lt(2)", "mapping", "ne(0)", "none", "number", "odd",
    "sameas(none)", "sameas(true)", "sequence", "string", "test", "true", "undefined", "upper",
]

OPERANDS = ["none", "true", "3", "-7", "2.5", "0", "'ab'", "'%s'", "[1]", "(2,)", "{'a': 1}", "missing", "10000000000000000000000"]
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", ">=", "in", "and", "or"]

METHODS = [
    "capitalize()", "casefold()", "center(20, '*')", "center(7)", "count('l')", "count('l', 3)", "count('')", "encode()", "endswith('d')",
    "endswith(('x', 'd'))", "expandtabs()", "expandtabs(3)", "find('o')", "find('o', 5)", "find('zz')", "find('o', -5, -1)", "index('W')", "index('zz')",
    "isalnum()", "isalpha()", "isascii()", "isdecimal()", "isdigit()", "isidentifier()", "islower()", "isnumeric()", "isprintable()",
    "isspace()", "istitle()", "isupper()", "join(['a', 'b'])", "join('xyz')", "join([1])", "ljust(15, '.')", "lower()", "lstrip()", "lstrip('Hel')",
    "partition(' ')", "partition('zz')", "removeprefix('He')", "removesuffix('ld')", "replace('l', 'L')", "replace('l', 'L', 1)",
    "replace('', '-')", "rfind('o')", "rindex('o')", "rjust(15)", "rpartition('o')", "rpartition('zz')", "rsplit()", "rsplit('o')",
    "rsplit('o', 1)", "rsplit(none, 1)", "rstrip()", "rstrip('dl')", "split()", "split('l')", "split('l', 1)", "split(none, 1)",
    "split(maxsplit=1)", "split(sep='l')", "splitlines()", "splitlines(true)", "startswith('He')", "startswith('l', 2)", "strip()", "strip('Hd')",
    "swapcase()", "title()", "upper()", "zfill(14)", "format(1)", "nosuch", "nosuch()", "append('x')", "__class__", "_x",
]
TEXTS = ["'Hello World'", "''", "'  two  words\\tand\\n'", "'Ǆ straße ΑΣ'", "'-42'", "'<b>'|safe", "'a\\r\\nb\\x0bc\\u2028d'", "'Ⅷ٣²½一'"]

TEMPLATES = r"""
{{ [1, 'a', none, true, 2.0] }}|{{ {'k': ('x',)} }}|{{ () }}
{{ 'a' 'b' "c" }}
{{ 1_000 + 0x_ff + 0b11 + 0o17 }}|{{ 1_0.5e1_0 }}|{{ 1.5e-10 }}|{{ .5 }}
{{ 12345678901234567890123 * 98765432109876543210 }}|{{ 2 ** 100 }}|{{ 2 ** -1 }}|{{ (-7) // 2 }}|{{ -7 % 3 }}|{{ 7 % -3 }}|{{ 7.5 // 2 }}|{{ -7.5 % 2 }}
{{ 1 / 0 }}
{{ 1 % 0 }}
{{ -2 ** 2 }}|{{ 2 ** 3 ** 2 }}|{{ 10 - 2 - 3 }}|{{ 2 + 3 * 4 }}|{{ 'a' ~ 1 + 2 }}
{{ 1 < 2 < 3 }}|{{ 1 < 3 < 2 }}|{{ 1 == 1.0 == true }}|{{ not 1 == 2 }}|{{ 'a' in 'abc' }}|{{ 'z' not in 'abc' }}|{{ 1 in [true] }}
{{ (0 and x.y.z) }}|{{ 0 or 'b' }}|{{ '' or none }}|{{ [] or {} }}|{{ 1 and 2 }}|{{ missing or 'd' }}
{{ 'yes' if n == 42 else 'no' }}|{{ 'yes' if n == 43 }}|{{ ('x' if false) is undefined }}|{{ 1 if true else 2 if false else 3 }}
{{ s[0] }}{{ s[-1] }}|{{ s[1:4] }}|{{ s[::-1] }}|{{ s[::2] }}|{{ s[10:2:-3] }}|{{ s[99] }}|{{ s[:-3] }}|{{ s[3:1] }}|{{ s[none:2] }}
{{ [1,2,3,4][1:] }}|{{ (1,2,3)[::-1] }}|{{ [1,2,3][5:] }}|{{ range(10)[2:8:3] }}|{{ range(10)[-1] }}|{{ [1,2,3][-4] }}
{{ tools[1:] }}
{{ d[1:] }}
{{ [1,2][::0] }}
{{ [1,2]['x'] }}|{{ [1,2].0 }}|{{ d.a }}|{{ d['a'] }}|{{ d.zz }}|{{ d['zz'] is defined }}|{{ nested.items }}
{{ nested.x.y.z }}|{{ nested['items'] }}|{{ nested['keys'] }}|{{ nested.items() }}|{{ nested.x.missing is defined }}
{{ nested.missing.deeper }}
{{ missing.attr }}
{{ missing['attr'] }}
{{ missing }}|{{ missing|default('x') }}|{{ missing is defined }}|{{ missing == other }}|{{ missing != none }}|{{ not missing }}|{{ missing|length }}|{{ missing|list }}
{{ missing + 1 }}
{{ 'a' + missing }}
{{ missing() }}
{{ missing > 1 }}
{{ -missing }}
{{ 'x' in missing }}|{{ missing in [1, other] }}|{% for x in missing %}x{% else %}empty{% endfor %}
{{ none.x }}|{{ none['x'] is undefined }}
{{ none() }}
{{ 'abc'() }}
{{ d.items() }}|{{ d.keys() }}|{{ d.values() }}|{{ d.items()|list }}|{{ d.get('a') }}|{{ d.get('q') }}|{{ d.get('q', 5) }}|{{ 'a' in d.keys() }}|{{ d.keys()|length }}
{{ d.update({'x': 1}) }}
{{ d.pop('a') }}
{{ d.update }}|{{ d.pop is defined }}|{{ [].append is callable }}
{{ [1].append(2) }}
{% set l = [] %}{{ l.append(1) }}
{{ [3,1,2].index(1) }}|{{ [3,1,1].count(1) }}|{{ [1].copy() }}|{{ (1,2,1).index(1, 1) }}
{{ [1].index(5) }}
{{ {1: 'a', 1.0: 'b', true: 'c'} }}|{{ {'a': 1, 'a': 2} }}|{{ {(1, 2): 3}[(1, 2)] }}|{{ {none: 1}[none] }}
{{ {[1]: 2} }}
{{ dict(a=1, b=2) }}|{{ dict({'x': 1}, y=2) }}|{{ dict([('k', 'v')]) }}|{{ dict() }}
{{ {'a': 1} == {'a': 1.0} }}|{{ [1, 2] < [1, 3] }}|{{ (1,) == [1] }}|{{ 'a' < 'b' }}|{{ [1] + [2] }}|{{ (1,) + (2,) }}|{{ [0] * 3 }}|{{ 3 * 'ab' }}|{{ 'ab' * -1 }}
{{ 'a' < 1 }}
{{ {} < {} }}
{{ 'x' + 1 }}
{{ [1] + (2,) }}
{{ '%s is %d years and %.2f%%' % ('Bob', 42, 3.14159) }}|{{ '%5d|%-5d|%05d|%+d|% d' % (42, 42, 42, 42, 42) }}|{{ '%x %X %o %#x %#o' % (255, 255, 8, 255, 8) }}
{{ '%e %E %g %G' % (12345.678, 0.00012, 1e10, 1e-10) }}|{{ '%r %s %a' % ('é', none, 'é') }}|{{ '%c%c' % (65, 'b') }}|{{ '%(a)s-%(b)03d' % {'a': 1, 'b': 2} }}
{{ '%.3s|%10s|%-10s|' % ('abcdef', 'x', 'y') }}|{{ '%*d|%.*f' % (5, 42, 2, 3.14159) }}|{{ '%s' % [1, 2] }}|{{ '%s' % {'a': 1} }}|{{ '100%%' % () }}|{{ '%d' % 3.99 }}|{{ '%i' % true }}
{{ '%s %s' % 'x' }}
{{ '%s' % ('a', 'b') }}
{{ '%d' % 'x' }}
{{ '%z' % 1 }}
{{ '%' % 1 }}
{{ 'abc' % 1 }}
{{ '%s' % missing }}|{{ '%s'|format('x') }}|{{ '%(n)s'|format(n=3) }}|{{ '<%s>'|safe % '<b>' }}|{{ ('<%s>'|safe)|format('&') }}
{{ '{} {}'.format(1, 'a') }}|{{ '{0}{1}{0}'.format('a', 'b') }}|{{ '{a} {b!r}'.format(a=1, b='x') }}|{{ '{:>8}|{:<8}|{:^8}|{:*^9}'.format('a', 'b', 'c', 'd') }}
{{ '{:05d} {:+d} {:,} {:_} {:x} {:#x} {:#b} {:o} {:c}'.format(42, 42, 1234567, 1234567, 255, 255, 5, 8, 65) }}|{{ '{:08.3f} {:.2e} {:g} {:%} {:.1%}'.format(3.14159, 12345.678, 0.0001, 0.25, 0.5) }}
{{ '{:,.2f} {:10.1f}| {:<10}| {:010}'.format(1234567.891, 2.55, 5, -7) }}|{{ '{:.3} {:.10} {:.1} {:.0f}'.format(3.14159, 10.0, 1234.5, 2.5) }}|{{ '{:{w}}|'.format('a', w=5) }}
{{ '{0.a} {0[a]} {1[0]}'.format(d, [9]) }}|{{ '{{}} {}'.format(1) }}|{{ '{a}'.format_map({'a': 5}) }}|{{ '{:5}|{:>5}|{:05}'.format(true, none|string, 'ab') }}
{{ '{}'.format() }}
{{ '{0} {}'.format(1, 2) }}
{{ '{:d}'.format('x') }}
{{ '{x}'.format(y=1) }}
{{ '{'.format(1) }}
{{ '{:>5}'.format(none) }}
{{ 'x'|safe + '<' }}|{{ '<' + 'x'|safe }}|{{ ('<b>'|safe) ~ '<i>' }}|{{ ['<b>'|safe, 'x'] }}|{{ ('a'|safe).upper() + '&' }}|{{ ('a,b'|safe).split(',') }}|{{ '<'|e|e }}|{{ '<'|forceescape }}
{{ ('x'|safe).join(['<', 'b'|safe]) }}|{{ ('a'|safe).replace('a', '<') }}|{{ ('%s'|safe) % ('<',) }}|{{ ('a'|safe)|string }}|{{ ('a'|safe) is string }}|{{ ('{}'|safe).format('<') }}
{{ lines|indent }}|{{ lines|indent(2, true) }}|{{ lines|indent('> ', first=true, blank=true) }}|{{ ''|indent }}|{{ 'a'|indent(width=3, first=True) }}
{{ 5|indent }}
{{ 'aaa'|replace('a', 'b', 2) }}|{{ 5|replace(5, 'x') }}|{{ 'abc'|replace('', '.') }}
{{ 'they\'re here-now (yes) [no] {x} <y>'|title }}|{{ 'foo bar'|capitalize }}
{{ 'foo bar baz qux'|truncate(9) }}|{{ 'foo bar baz qux'|truncate(9, true) }}|{{ 'foo bar baz qux'|truncate(11) }}|{{ 'foo bar baz qux'|truncate(11, false, '...', 0) }}|{{ 'abcdefghijkl'|truncate(5, end='') }}
{{ 'abc'|truncate(2) }}
{{ 'The quick brown fox-jumps over--the lazydogandmore'|wordwrap(10) }}|{{ 'aaaa bbbb'|wordwrap(3, false) }}|{{ 'a b c\nd e f'|wordwrap(3, wrapstring='/') }}|{{ 'ab-cd-ef-gh'|wordwrap(4, break_on_hyphens=false) }}
{{ 'a b'|wordwrap(0) }}
{{ 'a b&c/d?é'|urlencode }}|{{ {'a b': 1, 'c': '/'}|urlencode }}|{{ [('x', 'y z')]|urlencode }}|{{ 5|urlencode }}
{{ {'class': 'a"b', 'id': none, 'n': 5}|xmlattr }}|{{ {'a': 1}|xmlattr(false) }}|{{ {}|xmlattr }}
{{ {'a b': 1}|xmlattr }}
{{ '<p>a  <b>b</b>\n&amp; c</p><!-- x -->'|striptags }}|{{ '&lt;x&gt; &#65; &#x42;'|striptags }}
{{ 1|filesizeformat }}|{{ 999|filesizeformat }}|{{ 1000|filesizeformat }}|{{ 1234567|filesizeformat }}|{{ 1234567|filesizeformat(true) }}|{{ 1e27|filesizeformat }}|{{ '5'|filesizeformat }}
{{ 42.55|round }}|{{ 42.55|round(1) }}|{{ 42.55|round(1, 'floor') }}|{{ 42.1|round(method='ceil') }}|{{ 2.5|round }}|{{ 3.5|round }}|{{ 1234|round(-2) }}|{{ 0.125|round(2) }}|{{ 1255.0|round(-1) }}|{{ 15|round(-1) }}|{{ 25|round(-1) }}|{{ 0.5|round|int }}
{{ 1|round(1, 'up') }}
{{ '12'|int }}|{{ 'x'|int }}|{{ 'x'|int(5) }}|{{ '1f'|int(base=16) }}|{{ '0b11'|int(0, 2) }}|{{ 3.9|int }}|{{ '3.9'|int }}|{{ '1e3'|int }}|{{ none|int(7) }}|{{ true|int }}|{{ ' 5 '|int }}|{{ '1_000'|int }}|{{ 'nan'|int }}|{{ 'inf'|int(3) }}
{{ missing|int }}
{{ '1.5'|float }}|{{ 'x'|float }}|{{ 'x'|float(2.0) }}|{{ 3|float }}|{{ '1e400'|float }}|{{ 'nan'|float }}|{{ '-inf'|float }}
{{ items|sort(attribute='n')|map(attribute='n')|list }}|{{ items|sort(attribute='s')|map(attribute='s')|join }}|{{ items|sort(attribute='s,n')|map(attribute='n')|list }}|{{ ['b', 'A', 'a']|sort }}|{{ ['b', 'A', 'a']|sort(case_sensitive=true) }}|{{ [3,1,2]|sort(reverse=true) }}|{{ [(2, 'a'), (1, 'b')]|sort }}
{{ [1, 'a']|sort }}
{{ d|dictsort }}|{{ d|dictsort(true) }}|{{ d|dictsort(by='value', reverse=true) }}|{{ d|dictsort(false, 'value') }}
{{ d|dictsort(by='x') }}
{{ ['a', 'A', 'b']|unique|list }}|{{ ['a', 'A']|unique(true)|list }}|{{ items|unique(attribute='s')|map(attribute='n')|list }}|{{ [1, 1.0, true, 2]|unique|list }}
{{ [3, 1, 2]|min }}|{{ [3, 1, 2]|max }}|{{ ['b', 'A']|min }}|{{ items|max(attribute='n') }}|{{ []|min }}|{{ []|max is undefined }}|{{ ['b', 'B']|max }}
{{ items|groupby('s')|list }}|{% for g in items|groupby('s') %}{{ g.grouper }}:{{ g.list|length }};{% endfor %}|{% for k, v in items|groupby('n') %}{{ k }}{% endfor %}|{{ items|groupby('q', default='z')|map('first')|list }}|{{ items|groupby('s', case_sensitive=true)|map('first')|list }}
{{ [1, 2, 3]|sum }}|{{ items|sum(attribute='n') }}|{{ [1.5, 2]|sum(start=1) }}|{{ [[1], [2]]|sum(start=[]) }}|{{ []|sum }}
{{ ['a']|sum }}
{{ [1,2,3,4,5]|batch(2)|list }}|{{ [1,2,3]|batch(2, 'x')|list }}|{{ [1,2,3,4,5]|slice(3)|list }}|{{ [1,2,3,4,5]|slice(3, 'x')|list }}|{{ []|slice(2)|list }}
{{ items|map(attribute='s')|join('+') }}|{{ ['a', 'b']|map('upper')|list }}|{{ items|map(attribute='q', default='z')|list }}|{{ ['a']|map('replace', 'a', 'b')|first }}|{{ [[1, 2]]|map(attribute=1)|list }}|{{ [{'a': {'b': 5}}]|map(attribute='a.b')|list }}
{{ [1]|map('nosuch')|list }}
{{ [1]|map|list }}
{% set g = [1, 2]|map('string') %}{{ g|list }}{{ g|list }}
{{ [1]|map('nosuch') is iterable }}
{{ [1,2,3,4]|select('odd')|list }}|{{ [1,2,3,4]|reject('odd')|list }}|{{ [0, 1, '']|select|list }}|{{ items|selectattr('n', 'gt', 1)|map(attribute='n')|list }}|{{ items|selectattr('q')|list }}|{{ items|rejectattr('n', 'equalto', 1)|map(attribute='n')|list }}|{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|first }}|{{ [1, 2]|select('in', [2])|list }}|{{ messages|selectattr('tool_calls', 'defined')|list|length }}
{{ [1]|select('nosuch')|list }}
{{ [1,2,3]|first }}|{{ [1,2,3]|last }}|{{ []|first is undefined }}|{{ 'abc'|first }}|{{ 'abc'|last }}|{{ d|first }}|{{ d|last }}|{{ range(3)|last }}
{{ [1]|map('string')|last }}
{{ 'abc'|reverse }}|{{ [1,2,3]|reverse|list }}|{{ d|reverse|list }}|{{ [1,2]|map('string')|reverse }}|{{ range(3)|reverse|list }}
{{ 5|reverse }}
{{ [1, 2]|join('|') }}|{{ 'abc'|join('-') }}|{{ [1, none, true]|join(',') }}|{{ ['<b>'|safe, '<i>']|join }}|{{ d|join(',') }}|{{ items|join(',', attribute='s') }}
{{ [{'b': 1, 'a': [1, {'x': none}]}, 'é<>&\'"', 1.0, 1e22, 1e-7]|tojson }}|{{ {'b': 1, 'a': 2}|tojson(sort_keys=true) }}|{{ 'é\u2028😀\x7f\x01'|tojson(ensure_ascii=true) }}|{{ 'é\u2028😀\x7f\x01'|tojson }}
{{ {'a': [1, {'b': []}], 'c': {}}|tojson(indent=2) }}|{{ [1, 2]|tojson(indent='--') }}|{{ {'a': 1}|tojson(separators=(',', ':')) }}|{{ {'a': [1]}|tojson(indent=4, separators=(',', ': ')) }}|{{ [1]|tojson(indent=0) }}|{{ [[], {}]|tojson(indent=1) }}
{{ {1: 'a', none: 'b', true: 'c', 2.5: 'd'}|tojson }}|{{ (1, 2)|tojson }}|{{ 'a'|safe|tojson }}|{{ 'nan'|float|tojson }}|{{ 'inf'|float|tojson }}|{{ 12345678901234567890|tojson }}|{{ tools|tojson }}|{{ [1, 'a']|tojson(false, none, none, false) }}
{{ missing|tojson }}
{{ {(1,): 2}|tojson }}
{{ range(3)|tojson }}
{{ d.items()|tojson }}
{{ messages[2].tool_calls[0].function|tojson }}|{{ messages[2].tool_calls[0].function.arguments }}|{{ messages[2]|tojson(indent=2) }}
{{ d|pprint }}|{{ messages|pprint }}|{{ 'x'|pprint }}|{{ ('word ' * 30)|pprint }}|{{ ['a' * 50, 'b' * 50, ('c',) * 3]|pprint }}|{{ {'k' * 30: 'a b c ' * 12, 'j': [1] * 40}|pprint }}
{{ [1, 2]|attr('index') is callable }}|{{ d|attr('a') is undefined }}|{{ 'x'|attr('upper') is callable }}|{{ namespace(a=1)|attr('a') }}
{{ s is string }}|{{ n is number }}|{{ d is mapping }}|{{ [1] is sequence }}|{{ 'abc' is sequence }}|{{ {} is sequence }}|{{ true is number }}|{{ 5 is divisibleby 5 }}|{{ 4 is even and 3 is odd }}|{{ none is none }}|{{ x is undefined }}|{{ 'a' is in 'abc' }}|{{ 1 is not none }}|{{ 'upper' is filter }}|{{ 'nosuch' is filter }}|{{ 'odd' is test }}|{{ 5 is eq 5 }}|{{ 'A' is upper }}|{{ range is callable }}|{{ 'x' is callable }}|{{ 1 is sameas true }}
{{ 1 is divisibleby 0 }}
{{ 'a' is nosuch }}
{% if false %}{{ 'a'|nosuch }}{{ 1 is nosuch }}{% endif %}ok
{{ 'a'|nosuch if false else 'ok' }}
{% if true %}{{ 'a'|nosuch }}{% endif %}
{{ 'a'|nosuch }}
{% if false %}{% for x in [] %}{{ x|nosuch }}{% endfor %}{% endif %}
{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role[0] }}{{ ',' if not loop.last }}{% endfor %}
{% for x in [1,2,3] %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.depth }}{{ loop.depth0 }};{% endfor %}
{% for x in [1,2,3,4] %}{{ loop.cycle('a', 'b', 'c') }}{% endfor %}|{% for x in [1,1,2,2,1] %}{{ loop.changed(x) }} {% endfor %}
{% for x in [1,2,3,4,5] if x is odd %}{{ x }}:{{ loop.index }}/{{ loop.length }} {% endfor %}|{% for x in [1,2] if x > 5 %}{% else %}none{% endfor %}
{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }} {% endfor %}|{% for (a, b), c in [((1, 2), 3)] %}{{ a }}{{ b }}{{ c }}{% endfor %}|{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}|{% for k in d %}{{ k }}{% endfor %}|{% for a, in [(1,)] %}{{ a }}{% endfor %}
{% for a, b in [(1,)] %}{% endfor %}
{% for a, b in [(1, 2, 3)] %}{% endfor %}
{% for a, b in [1] %}{% endfor %}
{% for x in 5 %}{% endfor %}
{% for x in none %}{% endfor %}
{% for x in [1,2,3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}|{% for x in [1,2,3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}|{% for x in [1] %}{% break %}{% else %}E{% endfor %}|{% for x in [1] %}{% continue %}{% else %}E{% endfor %}|{% for x in [1,2] %}{% if x == 1 %}{% continue %}{% endif %}{% else %}E{% endfor %}
{% break %}
{% for x in [1] %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}
{% for x in [[1, [2]], [3]] recursive %}[{% if x is number %}{{ x }}{% else %}{{ loop(x) }}{% endif %}]{% endfor %}
{% for x in [1] %}{{ loop([2]) }}{% endfor %}
{% for x in [1, 2] %}{% for y in [3] %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}|{% for x in [1, 2] %}{% set outer = loop %}{% for y in [3, 4] %}{{ outer.index }}{{ loop.index }} {% endfor %}{% endfor %}
{% for x in [1,2,3] %}{{ loop }}{% endfor %}|{% for c in 'aé' %}{{ c }}.{% endfor %}|{% for x in range(3) %}{{ x }}{% endfor %}|{% for x in {'a': 1}.values() %}{{ x }}{% endfor %}
{% for loop in [1] %}{% endfor %}
{% for x in [1] %}{% set loop = 2 %}{% endfor %}
{% set x = 1 %}{% for i in [1, 2] %}{{ x }}{% set x = x + 10 %}{{ x }} {% endfor %}{{ x }}
{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}|{% with x = 5, y = x %}{{ x }}{{ y }}{% set x = 9 %}{% endwith %}{{ x }}|{% with %}{% set x = 7 %}{{ x }}{% endwith %}{{ x }}
{% set a, b = 1, 2 %}{{ a }}{{ b }}|{% set c = 1, 2 %}{{ c }}|{% set (d1, e1) = [3, 4] %}{{ d1 }}{{ e1 }}
{% set ns = namespace(a=1, found=false) %}{% for x in [1, 2] %}{% set ns.a = ns.a + x %}{% set ns.found = true %}{% endfor %}{{ ns.a }}{{ ns.found }}|{{ ns }}|{{ ns.zz is defined }}|{{ ns['a'] }}|{% set ns.new = [1] %}{{ ns.new }}|{% set ns.p, ns.q = 1, 2 %}{{ ns.p }}{{ ns.q }}
{% set ns = namespace({'x': 1}, y=2) %}{{ ns.x }}{{ ns.y }}|{% set q = {'a': 1} %}{% if q is mapping %}m{% endif %}
{% set q = {'a': 1} %}{% set q.a = 2 %}
{% set x %}body {{ n }}{% endset %}{{ x }}|{% set y | upper | replace('B', 'c') %}abc{% endset %}{{ y }}|{% set z %}{% endset %}{{ z|length }}
{% set true = 1 %}
{% macro m(a, b=2, c='x') %}{{ a }}-{{ b }}-{{ c }};{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(1, c='y') }}{{ m(b=5, a=4) }}{{ m() }}{{ m }}{{ m.name }}{{ m.arguments }}
{% macro m(a) %}{{ varargs }}{{ kwargs }}{{ a }}{% endmacro %}{{ m(1, 2, 3, k=4) }}|{{ m() }}|{{ m.catch_varargs }}{{ m.catch_kwargs }}{{ m.caller }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, a=2) }}
{% macro m(a=1, b) %}{% endmacro %}
{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}in {{ n }}{% endcall %}|{% macro w(x) %}{{ caller(x, 2) }}{% endmacro %}{% call(a, b=9) w(1) %}{{ a }}{{ b }}{% endcall %}
{% macro m() %}x{% endmacro %}{% call m() %}y{% endcall %}
{% macro m() %}{{ caller is defined }}{{ caller }}{% endmacro %}{{ m() }}
{% macro m() %}{{ caller() }}{% endmacro %}{{ m() }}
{% macro fact(k) %}{% if k <= 1 %}1{% else %}{{ k * fact(k - 1)|int }}{% endif %}{% endmacro %}{{ fact(5) }}
{% macro show() %}{{ late }}{% endmacro %}{% set late = 'L' %}{{ show() }}|{% for i in [1] %}{{ show() }}{% endfor %}|{% macro outer() %}{% macro inner() %}{{ n }}i{% endmacro %}{{ inner() }}{% endmacro %}{{ outer() }}
{% macro m(x, y=x ~ '!') %}{{ y }}{% endmacro %}{{ m('a') }}|{{ m('a', 'b') }}|{{ m(*['p', 'q']) }}|{{ m(**{'x': 'k'}) }}|{{ m(*['p'], **{'y': 'z'}) }}
{% macro m() %}  a  {% endmacro %}[{{ m()|trim }}]|{{ m() ~ 'x' }}|{{ m()|length }}
{% filter upper %}abc {{ s }}{% endfilter %}|{% filter replace('a', 'b')|upper %}banana{% endfilter %}
{% generation %}a{{ n }}{% endgeneration %}|{% set v = 1 %}{% generation %}{% set v = 2 %}{{ v }}{% endgeneration %}{{ v }}|{% for i in [1, 2] %}{% generation %}{{ loop.index }}{{ i }}{% endgeneration %}{% endfor %}
{% block a %}A{{ n }}{% endblock %}|{{ self.a() }}|{% block b scoped %}{{ n }}{% endblock b %}
{% block a %}1{% endblock %}{% block a %}2{% endblock %}
{% block a required %}{% endblock %}
{% for i in [1] %}{% block c %}[{{ i }}]{% endblock %}{% block e scoped %}[{{ i }}]{% endblock %}{% endfor %}
{% extends 'x' %}
{% include 'x' %}
{% include 'x' ignore missing %}
{% import 'x' as y %}
{% from 'x' import y %}
{% if false %}{% include 'x' %}{% import 'y' as z %}{% endif %}ok
{% autoescape false %}{{ '<' }}{% endautoescape %}
{% print 1, 'a' %}|{% print n %}
{% raw %}{{ x }}{% y %}{% endraw %}|{%- raw -%} {{ a }} {%- endraw -%} z
{# comment #}a{#- c -#} b {#+ d +#} c
a {{- 1 -}} b {{ 2 -}} c {{- 3 }} d
a{{+ 1 }}b
{% if n %}y{% elif s %}e{% else %}n{% endif %}|{% if not n %}y{% elif s %}e{% else %}n{% endif %}|{% if missing %}y{% endif %}|{% if [] %}y{% else %}n{% endif %}
{% if 1, 2 %}t{% endif %}|{% if (n > 5) and s %}u{% endif %}
{{ cycler('a', 'b').next() }}|{% set c = cycler(1, 2) %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.reset() }}{{ c.next() }}|{% set j = joiner() %}{{ j() }}a{{ j() }}b{{ j() }}|{% set k = joiner('/') %}{{ k() }}{{ k() }}
{{ cycler() }}
{{ range(3) }}|{{ range(1, 10, 3)|list }}|{{ range(5, 0, -2)|list }}|{{ range(0)|list }}|{{ 3 in range(5) }}|{{ range(3) == range(0, 3) }}
{{ range(100001) }}
{{ range(1, 2, 0) }}
{{ range('a') }}
{{ raise_exception('bad ' ~ n) }}
{{ 'a'.upper }}
{{ [1]|map('string') }}
{{ range }}
{{ namespace }}|{{ dict }}|{{ cycler }}
{{ ''.__class__ }}|{{ ''.__class__.__mro__ }}
{{ d.__class__ }}|{{ d._x }}|{{ d['__class__'] }}|{{ 5 .__class__ is defined }}
{{ (5).real }}|{{ 2.5.is_integer() }}|{{ (255).bit_length() }}|{{ true.real }}
{{ '\x41\u00e9\101\n\t\\\'\d\é' }}|{{ "a\
b" }}|{{ '\U0001F600' }}
{{ '\ud800' }}
{{ '\x4' }}
{{ 'unclosed }}
{{ 1 + }}
{{ (1 }}
{{ 1) }}
{{ [1} }}
{{ a b }}
{{ }}
{{ 1 ! 2 }}
{{ f(a=1, 2) }}
{{ f(**a, *b) }}
{% if %}{% endif %}
{% if 1 %}
{% endif %}
{% for x in %}{% endfor %}
{% for 1 in [1] %}{% endfor %}
{% nosuch %}
{% set %}
{% set x.y.z = 1 %}
{{ 1 is string is string }}
{# unclosed
{% raw %} unclosed
{{ n
{%- if n -%}
{{ x[1:2, 3] }}
{{ 007 }}
{{ 1.e5 }}
{{ 1__0 }}
{{ true }}{{ True }}{{ false }}{{ none }}{{ None }}|{{ [true, none] }}
{{ 'a'|upper|lower|length }}|{{ ('a'|upper)[0] }}|{{ -1|abs }}|{{ (-1)|abs }}|{{ 1 + 2|float }}|{{ not 'a' is string }}|{{ 'a'|upper is string }}|{{ 3 is odd and 4 is even or false }}
{{ messages[0].content.strip() ~ '|' ~ messages[0]['content'].rstrip('. ') }}|{{ messages[4].content.split('</think>')[-1].lstrip('\n') }}|{{ messages[4].content.split('<think>')[1].split('</think>')[0].strip() }}
{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}{% elif m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{{ ', ' if not loop.last }}{% endfor %}){% endfor %}{% elif m.content is none %}-{% else %}{{ m.role }}{% endif %};{% endfor %}
{% for m in messages[::-1] %}{{ loop.index0 }}{{ m.role[:2] }}{% endfor %}|{% for m in (messages|reverse) %}{{ m.role[0] }}{% endfor %}|{{ messages[1:]|length }}|{{ messages[-1].role }}|{{ (messages|last).role }}|{{ messages|map(attribute='role')|join(',') }}
{% if tools is not none and tools|length > 0 %}T{% else %}N{% endif %}|{% if tools is iterable and tools|length > 0 %}T{% else %}N{% endif %}|{% if documents is not none %}D{% else %}N{% endif %}|{{ tools|tojson }}|{{ tools }}|{{ tools is defined }}|{{ tools|default([]) }}|{{ tools or 'x' }}
{{ tools|length }}
{{ ['integer', 'null']|string }}|{{ {'a': [None]} }}|{{ 1e22 }}|{{ 1e-7 }}|{{ 1e16 }}|{{ 123456789.123456789 }}|{{ 0.1 + 0.2 }}|{{ 1.0 }}|{{ -0.0 }}|{{ 1e308 * 10 }}|{{ 100000000000000000000|string }}
{{ ["a'b", 'a"b', 'a\'b"c', '\\', '\x00\x1f\x7f\x80\xa0\xad\u200b\u2028é😀\n'] }}
{{ [missing, range(2), 'x'|safe, d.keys(), namespace(z=1), 5 == 5] }}
{{ 'é'.encode() }}|{{ ['é'.encode()] }}|{{ 'é'.encode().decode() }}
{{ 10 ** 5000 }}
{{ (10 ** 5000) % 7 }}|{{ 2 ** 0.5 }}|{{ 0 ** 0 }}|{{ (-8) ** 2 }}|{{ 2.0 ** 3 }}
{{ 0 ** -1 }}
{{ 10.0 ** 400 }}
{{ 7 // 0.0 }}
{{ 5 / 2 }}|{{ 4 / 2 }}|{{ 7 // 2.0 }}|{{ 1e300 * 1e10 }}|{{ 9007199254740993 == 9007199254740992.0 }}|{{ 10000000000000000000000 == 1e22 }}|{{ 3 % 2.5 }}|{{ true + true }}
{{ 'abc'|length }}{{ 'é😀'|length }}{{ 'é😀x'[1] }}{{ 'é😀x'[::-1] }}{{ 'é😀x'.find('x') }}
{{ 'ß'.upper() }}|{{ 'ß'.title() }}|{{ 'ﬁ'.capitalize() }}|{{ 'ǆ'.title() }}|{{ 'ΑΣ'.lower() }}|{{ 'İ'.lower()|length }}|{{ 'ŉ'.title() }}|{{ "they're bill's"|title }}|{{ "they're".title() }}
""".strip("\n").split("\n")

BLOCKS = [
    "  {% if n %}\n  x\n  {% endif %}\ny\n",
    "a\n\n{% for x in [1, 2] %}\n  {{ x }}\n{% endfor %}\nb\n\n",
    "a\n  {%- if n %} b {%- endif %}  \nc",
    "a\n  {%+ if n %}b{% endif +%}\nc",
    "{% if n -%}\n\n  b\n{%- endif %}\n\nc",
    "\t{% set x = 1 %}\t\n{{ x }}\n",
    "  {{ n }}\n  {# c #}\n  d",
    "a {# c #}\nb {# c -#}\n  c",
    "{%- for m in messages %}\n    {{- m.role }}\n{%- endfor %}\n",
    "x  {% raw %}\n {{ a }}\n  {% endraw %}\n y",
    "  {%- raw +%} a {% endraw %}",
    "a\r\nb\rc{% if n %}\r\nd{% endif %}\r\n",
    "{{ 'a\r\nb' }}",
    "{% if n %}\n{% if s %}\nx\n{% endif %}\n{% endif %}\nz",
    "{{ n }}\n",
    "{{ n }}\n\n",
    "\n{{ n }}",
    "a {% if n %} \n b {% endif %} \n",
    "    {% macro m(x) %}\n      {{ x }}\n    {% endmacro %}\n{{ m(1) }}|",
    "{%-if n-%} a {%-endif-%} b",
    "{%if n%}a{%endif%}",
    "{{n}}{{-n-}} {{n}}",
    "{% set x %}\n  a\n  {% endset %}\n[{{ x }}]",
    "a{% generation %}\n b\n{% endgeneration %}\nc",
    "a\n{%- generation -%}\n b \n{%- endgeneration %}\nc",
    "{# a #}\n\n{# b #}\nx",
    "é  {%- if n %}ü{% endif %}\u00a0{{- n }}",
    "{{ '{{' }}{{ '%}' }}{{ \"#}\" }}",
    "{{ {'a': {'b': 1}}['a']['b'] }}{{ {} }}",
    "{ {n} } { % x % } {",
    "{%\n  set\n  x\n  =\n  1\n%}{{\nx\n}}",
    "{% for x in [1] %}{% else %}\n  e\n{% endfor %}\nf",
]


def render(template):
    try:
        text = ENVIRONMENT.from_string(template).render(**CONTEXT)
        text.encode()
    except BaseException:  # noqa: B036 - a RecursionError is an error of the template as well
        return None
    return None if " at 0x" in text or "<bound method" in text else text


def main():
    templates = list(dict.fromkeys(TEMPLATES)) + BLOCKS
    # The order of mixed keys in pprint is that of the names of their types.
    filtered = [(value, name) for value in VALUES for name in FILTERS if not (name == "pprint" and "2: 2.0" in value)]
    templates += ["{{ (%s)|%s }}" % pair for pair in filtered]
    templates += ["{{ (%s) is %s }}" % (value, name) for value in VALUES for name in TESTS]
    templates += ["{{ %s }}|{{ [%s] }}" % (value, value) for value in VALUES]
    pairs = [(a, operator, b) for a in OPERANDS for operator in OPERATORS for b in OPERANDS]
    templates += ["{{ %s %s %s }}" % pair for pair in pairs if not (pair[1] == "**" and (len(pair[2]) > 9 or pair[2] == "2.5"))]
    templates += ["{{ (%s).%s }}" % (text, method) for text in TEXTS for method in METHODS]
    print(json.dumps(CONTEXT))
    for template in templates:
        print(json.dumps([template, render(template)], ensure_ascii=False))


main()
