//! Error texts of the grammar library (llguidance), each with the message that clients get instead.

/// A text of the library and our message for it.
pub(super) struct LibraryError {
    /// Parts of the library's text, in order. The text begins with the first part.
    pub(super) parts: &'static [&'static str],
    /// Message for clients. `{}` is replaced by a name from the grammar, or by `it` if there is none.
    pub(super) message: &'static str,
    /// Whether a further text of the library follows, which tells the cause.
    pub(super) has_cause: bool,
}

const fn error(parts: &'static [&'static str], message: &'static str) -> LibraryError {
    LibraryError { parts, message, has_cause: false }
}

const fn with_cause(parts: &'static [&'static str], message: &'static str) -> LibraryError {
    LibraryError { parts, message, has_cause: true }
}

const COMPLEX: &str = "the grammar is too complex";
const DEEP: &str = "the grammar is nested too deeply";
const JSON_TYPE: &str = "the value of {} has the wrong type";
const NUMBER: &str = "the bounds of a number cannot be enforced";
const TOKEN_RANGE: &str = "a range of token ids is invalid";
const TOO_EARLY: &str = "the grammar ends too early";

/// Errors of all kinds of grammars.
const COMMON: &[LibraryError] = &[
    error(&["NoExtensionBias"], "the grammar accepts no text"),
    error(&["LexerTooComplex"], "the grammar is too complex: the lexer exceeds its limits"),
    error(&["ParserTooComplex"], "the grammar is too complex: the parser exceeds its limits"),
    error(&["InternalError"], "the grammar cannot be enforced"),
    error(&["Empty grammar"], "the grammar is empty"),
    error(&["initial lexer configuration"], COMPLEX),
    error(&["grammar size"], COMPLEX),
    error(&["lexer precomputation"], COMPLEX),
    error(&["Current row has"], COMPLEX),
    error(&["fuel exhausted"], COMPLEX),
    error(&["DNF too large"], COMPLEX),
    error(&["maximum relevance check fuel"], COMPLEX),
    error(&["Unable to determine if regex"], COMPLEX),
    error(&["unknown special token"], "the model has no special token {}"),
    error(&["unknown grammar"], "the grammar {} is not defined"),
];

/// Errors of Lark grammars.
const LARK: &[LibraryError] = &[
    error(&["unknown name: "], "{} is not defined"),
    error(&["rule ", " not found"], "{} is not defined"),
    error(&["circular reference in token "], "the terminal {} refers to itself"),
    error(&["range start must be a"], "both ends of a range must be single characters"),
    error(&["range end must be a"], "both ends of a range must be single characters"),
    error(&["invalid range order"], "a range of characters ends before its start"),
    error(&["l-flag"], "the flag l of regular expressions is not available"),
    error(&["special tokens (like"], "a terminal must not contain special tokens"),
    error(&["%json literals"], "a terminal must not contain %json"),
    error(&["grammar references"], "a terminal must not refer to a grammar"),
    error(&["nested %lark"], "a terminal must not contain %lark"),
    error(&["name::param"], "a terminal must not have parameters"),
    error(&["template usage"], "templates are not available"),
    error(&["ranges not supported"], "an operator and a repetition exclude each other"),
    error(&["range start must be >="], "a repetition must not begin below 0"),
    error(&["range end must be >="], "a repetition must not end before its start"),
    error(&["unsupported operator"], "the operator {} is not available"),
    error(&["'%if'"], "a terminal must not contain %if"),
    error(&["expected %lark or"], "%lark or %json must follow"),
    error(&["negated wildcard"], TOKEN_RANGE),
    error(&["wildcard token range"], TOKEN_RANGE),
    error(&["invalid token range"], TOKEN_RANGE),
    error(&["Invalid token range"], TOKEN_RANGE),
    error(&["Token range end"], TOKEN_RANGE),
    error(&["empty token range"], TOKEN_RANGE),
    error(&["negation of empty"], TOKEN_RANGE),
    error(&["& is only"], "the operator & needs terminals on both sides"),
    error(&["numeric grammar"], "a grammar must be referred to by its name"),
    error(&["stop= and suffix="], "stop and suffix exclude each other"),
    error(&["stop-like"], "a rule with parameters must not have stop or suffix"),
    error(&["temperature= is"], "a rule with parameters must not have temperature"),
    error(&["max_tokens= is"], "a rule with parameters must not have max_tokens"),
    error(&["stop_capture_name"], "stop_capture needs stop or suffix"),
    error(&["temperature mismatch"], "a nested grammar has another temperature"),
    error(&["rule ", "parametric"], "the parameters of the rule {} do not match their use"),
    error(&["no ", " rule found"], "there is no rule start"),
    error(&["failed to parse %llguidance"], "the declaration of options is invalid"),
    with_cause(&["failed to compile JSON schema: "], "an embedded JSON schema is invalid"),
    error(&["duplicate "], "{} is defined twice"),
    error(&["override statement"], "the statement %override is not available"),
    error(&["declare statement"], "the statement %declare is not available"),
    error(&["params not"], "parameters are not available here"),
    error(&["priority not"], "priorities are not available"),
    error(&["no fields set on %regex"], "%regex needs exactly one field"),
    error(&["only one field"], "%regex needs exactly one field"),
    error(&["lark grammar too deeply"], DEEP),
    error(&["Cannot have multiple stop"], "a rule must not have several stop conditions"),
    error(&["Unknown attribute: "], "the attribute {} does not exist"),
    error(&["Unknown common regex: "], "the imported terminal {} does not exist"),
    error(&["Expected at least one name"], "names must follow %declare"),
    error(&["expected JSON value"], "a JSON value must follow"),
    error(&["expected regex JSON"], "a JSON value must follow %regex"),
    error(&["expecting rule, token"], "neither a rule nor a terminal nor a statement begins here"),
    error(&["error parsing string"], "a quoted text is invalid"),
    error(&["error parsing signed"], "a number is invalid"),
    error(&["error parsing unsigned"], "a number is invalid"),
    error(&["End number in range"], "a repetition must not end at 0"),
    error(&["flags not allowed"], "flags must not be set here"),
    error(&["Unmatched %lark"], "the braces of %lark are not closed"),
    error(&["Expected '{'"], "an opening brace is missing"),
    error(&["Expected '.'"], "a dot is missing"),
    error(&["Expected '('"], "an opening parenthesis is missing"),
    error(&["Expected value"], "a symbol or text is missing"),
    error(&["Expected name"], "the name of a rule or terminal is missing"),
    error(&["Expected token ", "found end of input"], TOO_EARLY),
    error(&["Expected token "], "the grammar continues with a wrong symbol"),
    error(&["expected '_' or"], "a parameter is invalid"),
    error(&["Unexpected "], "the parameter {} is invalid"),
    error(&["end bit index"], "a parameter has an invalid range of bits"),
    error(&["number ", " too large"], "a number is too large"),
    error(&["expected string"], "a quoted text is missing"),
    error(&["lexer error"], "a character does not belong here"),
    error(&["lexer special token"], "a character does not belong here"),
    error(&["failed to parse %regex"], "the JSON value after %regex is invalid"),
    error(&["failed to parse "], "a quoted text is invalid"),
    error(&["empty json"], "a JSON value is missing"),
    error(
        &["", "temperature= and max_tokens= only"],
        "a rule must not have temperature or max_tokens",
    ),
];

/// Errors of JSON schemas.
const SCHEMA: &[LibraryError] = &[
    with_cause(&["Unsatisfiable schema: "], "the schema accepts no value"),
    error(&["All options in anyOf"], "no option of anyOf accepts a value"),
    error(&["No options in anyOf"], "anyOf has no option"),
    error(&["anyOf is empty"], "no option of anyOf accepts a value"),
    error(&["oneOf is empty"], "no option of oneOf accepts a value"),
    error(&["schema is false"], "false accepts no value"),
    error(&["incompatible "], "several types exclude each other"),
    error(&["required property "], "the property {}, which must exist, accepts no value"),
    error(&["required item "], "an item that must exist accepts no value"),
    error(&["required > "], "required exceeds maxProperties"),
    error(&["prefixItems["], "an item of prefixItems that must exist accepts no value"),
    error(&["minProperties > "], "minProperties exceeds maxProperties"),
    error(&["minProperties ("], "minProperties exceeds the number of properties"),
    error(&["minLength (", "is greater"], "minLength exceeds maxLength"),
    error(&["minLength ("], "minLength is too large"),
    error(&["maxLength ("], "maxLength is too large"),
    error(&["minItems ("], "minItems exceeds maxItems"),
    error(&["Constant ", "length constraints"], "a constant violates minLength or maxLength"),
    error(&["Regex is empty"], "a pattern accepts no text of the permitted length"),
    error(&["Schema intersection"], "the schema is nested too deeply"),
    error(&["schema too large"], "the schema is too large"),
    error(&["enum must be "], "the value of enum has the wrong type"),
    error(&["allOf must be "], "the value of allOf has the wrong type"),
    error(&["anyOf must be "], "the value of anyOf has the wrong type"),
    error(&["oneOf must be "], "the value of oneOf has the wrong type"),
    error(&["$ref must be "], "the value of $ref has the wrong type"),
    error(&["properties must be "], "the value of properties has the wrong type"),
    error(&["prefixItems must be "], "the value of prefixItems has the wrong type"),
    error(&["type must be "], "the value of type has the wrong type"),
    error(&["schema must be "], "a schema is neither an object nor a boolean"),
    error(
        &["circular references with"],
        "a $ref to an enclosing schema must have no other keywords beside it",
    ),
    error(&["Invalid type: "], "the type {} does not exist"),
    error(&["Expected ", " for '"], JSON_TYPE),
    error(&["Value for 'multipleOf'"], "the value of multipleOf cannot be enforced"),
    error(&["Value ", " for '", "too large"], "the value of {} is too large"),
    error(&["Unimplemented keys: "], "the keyword {} cannot be enforced"),
    error(&["Unknown applicator"], "the keyword {} cannot be enforced"),
    error(&["Unknown format"], "the format {} cannot be enforced"),
    error(&["Definition not found: "], "the $ref {} does not exist"),
    error(&["Reference segment "], "the $ref {} does not exist"),
    error(&["Only absolute $ref"], "a $ref needs # at its start"),
    error(&["oneOf constraints"], "oneOf with overlapping options cannot be enforced"),
    error(&["can't determine if patternProperty"], "patterns of patternProperties are too complex"),
    error(&["patternProperty regexes"], "patterns of patternProperties overlap"),
    error(&["min/maxProperties"], "minProperties and maxProperties cannot be enforced here"),
    error(&["Failed to generate regex"], NUMBER),
    error(&["Infinite numbers"], NUMBER),
    error(&["Invalid range"], NUMBER),
    error(&["Empty range"], NUMBER),
];

/// Errors of the regular-expression parser.
const REGEX: &[LibraryError] = &[
    error(&["exceeded the maximum number of capturing"], "there are too many groups"),
    error(
        &["invalid escape sequence found in"],
        "a character class has an invalid escape sequence",
    ),
    error(&["invalid character class range"], "a range of a character class ends before its start"),
    error(
        &["invalid range boundary"],
        "a range of a character class needs characters at both ends",
    ),
    error(&["unclosed character class"], "a character class is not closed"),
    error(&["decimal literal"], "a decimal number is invalid"),
    error(&["hexadecimal literal"], "a hexadecimal number is invalid"),
    error(&["invalid hexadecimal"], "a hexadecimal number is invalid"),
    error(&["incomplete escape"], "an escape sequence is incomplete"),
    error(&["unrecognized escape"], "an escape sequence does not exist"),
    error(&["dangling flag"], "a negation of flags has no flag"),
    error(&["duplicate flag"], "a flag is repeated"),
    error(&["flag negation operator repeated"], "a negation of flags is repeated"),
    error(&["expected flag"], "a flag is missing"),
    error(&["unrecognized flag"], "a flag does not exist"),
    error(&["duplicate capture"], "two groups have one name"),
    error(&["empty capture"], "a group has an empty name"),
    error(&["invalid capture"], "the name of a group has an invalid character"),
    error(&["unclosed capture"], "the name of a group is not closed"),
    error(&["unclosed group"], "a group is not closed"),
    error(&["unopened group"], "a closing parenthesis has no group"),
    error(&["exceed the maximum number of nested"], "groups are nested too deeply"),
    error(&["invalid repetition count"], "a repetition ends before its start"),
    error(&["repetition quantifier expects"], "a repetition has no number"),
    error(&["unclosed counted"], "a repetition is not closed"),
    error(&["repetition operator missing"], "a repetition has nothing to repeat"),
    error(&["special word boundary"], "a word boundary is invalid"),
    error(&["unrecognized special word"], "a word boundary is invalid"),
    error(&["found either the beginning"], "a word boundary or repetition is not closed"),
    error(&["invalid Unicode character class"], "a class of Unicode characters is invalid"),
    error(&["backreferences are"], "references to groups cannot be enforced"),
    error(&["look-around"], "assertions about the text before or after a place cannot be enforced"),
    error(&["lookarounds"], "assertions about the text before or after a place cannot be enforced"),
    error(&["Unicode not allowed"], "a Unicode character is not allowed here"),
    error(&["pattern can match invalid"], "the expression matches invalid UTF-8"),
    error(&["Unicode property"], "a property of Unicode characters does not exist"),
    error(&["Unicode-aware"], "a class of Unicode characters is not available"),
    error(&["compiled regex exceeds"], COMPLEX),
];

/// Returns the entry of a text of the library.
pub(super) fn find(text: &str) -> Option<&'static LibraryError> {
    all().find(|error| error.matches(text))
}

/// Returns the entry of a text of the regular-expression parser.
pub(super) fn find_regex(text: &str) -> Option<&'static LibraryError> {
    REGEX.iter().find(|error| error.matches(text))
}

/// Returns all entries but those of regular expressions, in the order in which they are compared.
fn all() -> impl Iterator<Item = &'static LibraryError> {
    [COMMON, LARK, SCHEMA].into_iter().flatten().chain(REGEX.iter().filter(|e| is_plain(e)))
}

/// Whether the regular-expression parser reports this error without a frame around it.
fn is_plain(error: &LibraryError) -> bool {
    error.parts[0] == "lookarounds"
}

impl LibraryError {
    fn matches(&self, text: &str) -> bool {
        let mut rest = text;
        text.starts_with(self.parts[0])
            && self.parts.iter().all(|part| match rest.split_once(part) {
                Some((_, after)) => {
                    rest = after;
                    true
                }
                None => false,
            })
    }
}

/// Returns all texts of the library that entries recognize, for tests that search for them in messages.
#[cfg(test)]
pub(crate) fn library_texts() -> impl Iterator<Item = &'static str> {
    let entries = [COMMON, LARK, SCHEMA, REGEX].into_iter().flatten();
    entries.flat_map(|error| error.parts).copied().map(str::trim).filter(|part| part.len() > 9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_contain_no_text_of_the_library() {
        for entry in [COMMON, LARK, SCHEMA, REGEX].into_iter().flatten() {
            let copied = library_texts().find(|text| entry.message.contains(text));
            assert_eq!(copied, None, "{}", entry.message);
        }
    }

    #[test]
    fn parts_are_found_in_order() {
        let entry = find("Value 99 for 'minItems' is too large").unwrap();
        assert_eq!(entry.message, "the value of {} is too large");
        assert_eq!(find("rule \"a\" not found").unwrap().message, "{} is not defined");
        assert!(find("not found: rule ").is_none());
    }
}
