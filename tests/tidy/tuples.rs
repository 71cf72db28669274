//! Counts functions with anonymous tuples in their parameters or results.

use crate::source_tree::rust_files;

/// Maximum number of functions with a tuple in a parameter type. It may be lowered, but not raised.
const TUPLE_PARAMETERS_MAX: usize = 9;
/// Maximum number of functions with a tuple in the result type. It may be lowered, but not raised.
const TUPLE_RESULTS_MAX: usize = 229;

/// Part of a function signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SignaturePart {
    /// Generic parameters, between the name and the parameter list.
    Generics,
    Parameters,
    /// Result type and `where` clause.
    Result,
}

/// An open bracket of a signature.
#[derive(Debug)]
struct OpenBracket {
    bracket: char,
    /// Whether it opens the parameter list, or the arguments of a call or of a function type.
    is_list: bool,
    has_comma: bool,
}

/// Whether a function has anonymous tuples.
#[derive(Debug, Default, PartialEq, Eq)]
struct TupleUse {
    in_parameters: bool,
    in_result: bool,
}

/// Reader of one function signature.
struct SignatureReader {
    part: SignaturePart,
    open: Vec<OpenBracket>,
    found: TupleUse,
}

impl SignatureReader {
    fn open_bracket(&mut self, bracket: char, follows_name: bool) {
        let is_outermost = bracket == '(' && self.open.is_empty();
        let opens_parameters = is_outermost && self.part == SignaturePart::Generics;
        if opens_parameters {
            self.part = SignaturePart::Parameters;
        }
        let is_list = opens_parameters || follows_name;
        self.open.push(OpenBracket { bracket, is_list, has_comma: false });
    }

    /// Returns false if no bracket is open: the signature has ended.
    fn close_bracket(&mut self) -> bool {
        let Some(closed) = self.open.pop() else { return false };
        if closed.bracket == '(' && !closed.is_list && closed.has_comma {
            let in_result = self.part == SignaturePart::Result;
            self.found.in_result |= in_result;
            self.found.in_parameters |= !in_result;
        }
        if self.open.is_empty() && self.part == SignaturePart::Parameters {
            self.part = SignaturePart::Result;
        }
        true
    }
}

impl TupleUse {
    /// Reads a signature from the function's name on; the text after the signature is ignored.
    fn of(signature: &str) -> Self {
        let (part, open, found) = (SignaturePart::Generics, Vec::new(), Self::default());
        let mut reader = SignatureReader { part, open, found };
        let (mut previous, mut previous_visible) = (' ', ' ');
        for c in signature.chars() {
            let follows_name = previous_visible.is_alphanumeric() || previous_visible == '_';
            match c {
                '(' | '[' | '<' => reader.open_bracket(c, follows_name),
                '>' if previous == '-' => {}
                ')' | ']' | '>' if !reader.close_bracket() => break,
                ',' => {
                    if let Some(bracket) = reader.open.last_mut() {
                        bracket.has_comma = true;
                    }
                }
                '{' | ';' if reader.open.is_empty() => break,
                _ => {}
            }
            previous = c;
            if !c.is_whitespace() {
                previous_visible = c;
            }
        }
        reader.found
    }
}

#[test]
fn parameters_and_results_have_names() {
    let (mut parameters, mut results) = (Vec::new(), Vec::new());
    for file in rust_files() {
        let code: Vec<&str> =
            file.text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
        for signature in code.join("\n").split("fn ").skip(1) {
            let tuples = TupleUse::of(signature);
            let name = signature.split(['(', '<']).next().unwrap_or_default();
            if tuples.in_parameters {
                parameters.push(format!("{}: {name}", file.path));
            }
            if tuples.in_result {
                results.push(format!("{}: {name}", file.path));
            }
        }
    }
    println!("{} functions take a tuple, {} return one", parameters.len(), results.len());
    let check = |what: &str, found: &[String], max: usize| {
        let places = found.join("\n  ");
        assert!(
            found.len() <= max,
            "{} functions {what} a tuple, at most {max}:\n  {places}",
            found.len()
        );
    };
    check("take", &parameters, TUPLE_PARAMETERS_MAX);
    check("return", &results, TUPLE_RESULTS_MAX);
}

#[test]
fn tuples_are_found_inside_generic_types() {
    let takes = TupleUse { in_parameters: true, in_result: false };
    let returns = TupleUse { in_parameters: false, in_result: true };
    for signature in [
        "f(a: u32, b: (u32, u32)) -> u32 {",
        "f(a: &[(u32, u32)]) {",
        "f(a: Vec<(u32, [u8; 4])>, b: u32);",
        "f(a: Option<(A, B)>) -> Result<(), E> {",
        "f<T: Iterator<Item = (A, B)>>(a: T) {",
    ] {
        assert_eq!(TupleUse::of(signature), takes, "{signature}");
    }
    for signature in ["f(a: u32) -> (u32, u32) {", "f(a: [u8; 2]) -> Result<Vec<(A, B)>, E> {"] {
        assert_eq!(TupleUse::of(signature), returns, "{signature}");
    }
    for signature in ["f(a: u32, b: u32) -> Result<(), E> {", "f(a: impl Fn(A, B) -> C, b: ()) {"] {
        assert_eq!(TupleUse::of(signature), TupleUse::default(), "{signature}");
    }
}
