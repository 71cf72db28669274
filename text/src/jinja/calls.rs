//! Calls of macros, of environment functions, and of other callable values.

use super::arguments::{CallArguments, KeywordArgumentValue, integer_argument, text_argument};
use super::dict::DictValue;
use super::error::{JinjaError, JinjaErrorKind, JinjaResult};
use super::evaluator::TemplateEvaluator;
use super::iteration::ValueIterator;
use super::scope::ScopeFrame;
use super::value::{
    BuiltinFunction, CyclerValue, JinjaSequence, JinjaValue, JoinerValue, MacroValue, RangeValue,
};
use std::cell::Cell;
use std::rc::Rc;

/// Maximum number of integers in a range, as in Jinja2's sandbox.
const RANGE_MAX: u64 = 100_000;

impl BuiltinFunction {
    /// Returns the function that a template calls by `name`.
    pub(crate) fn find(name: &str) -> Option<Self> {
        Some(match name {
            "range" => Self::Range,
            "dict" => Self::Dict,
            "namespace" => Self::Namespace,
            "cycler" => Self::Cycler,
            "joiner" => Self::Joiner,
            "lipsum" => Self::Lipsum,
            "raise_exception" => Self::RaiseException,
            "strftime_now" => Self::StrftimeNow,
            _ => return None,
        })
    }
}

/// Whether a value can be called.
pub(crate) fn is_callable(value: &JinjaValue) -> bool {
    matches!(
        value,
        JinjaValue::Undefined(_)
            | JinjaValue::Macro(_)
            | JinjaValue::Function(_)
            | JinjaValue::Method(_)
            | JinjaValue::Loop(_)
            | JinjaValue::Joiner(_)
            | JinjaValue::Block(_)
    )
}

impl TemplateEvaluator {
    /// Calls a value.
    ///
    /// Errors: the value cannot be called, the call fails, or a limit is exceeded.
    pub(crate) fn call(
        &mut self,
        callee: &JinjaValue,
        arguments: CallArguments,
    ) -> JinjaResult<JinjaValue> {
        match callee {
            JinjaValue::Undefined(cause) => Err(cause.error()),
            JinjaValue::Macro(definition) => {
                let definition = Rc::clone(definition);
                self.nested(|evaluator| evaluator.call_macro(&definition, arguments))
            }
            JinjaValue::Function(function) => self.call_function(*function, arguments),
            JinjaValue::Method(method) => (method.function)(self, &method.receiver, arguments),
            JinjaValue::Loop(state) => {
                let [iterable] = arguments.bind("__call__", ["iterable"], 1)?;
                let iterable = iterable.unwrap_or(JinjaValue::None);
                let Some(node) = &state.recursive else {
                    return Err(JinjaError::type_error(
                        "The loop must have the 'recursive' marker to be called recursively.",
                    ));
                };
                let depth = state.depth0 + 1;
                let text = self.nested(|evaluator| {
                    evaluator.render_loop(node, &iterable, &state.scope, depth)
                })?;
                Ok(JinjaValue::text(text))
            }
            JinjaValue::Joiner(joiner) => {
                arguments.expect_none("joiner")?;
                let is_first = !joiner.used.replace(true);
                Ok(if is_first { JinjaValue::text("") } else { joiner.separator.clone() })
            }
            JinjaValue::Block(name) => {
                arguments.expect_none("block")?;
                let Some(block) = self.block(name) else {
                    return Err(JinjaError::runtime(format!("no block named '{name}'")));
                };
                let text = self.nested(|evaluator| {
                    evaluator.capture(|evaluator| {
                        evaluator.execute(&block.body, &Some(ScopeFrame::new(&None)))
                    })
                })?;
                Ok(JinjaValue::text(text))
            }
            _ => {
                let kind = callee.type_name();
                Err(JinjaError::type_error(format!("'{kind}' object is not callable")))
            }
        }
    }

    fn call_macro(
        &mut self,
        definition: &Rc<MacroValue>,
        arguments: CallArguments,
    ) -> JinjaResult<JinjaValue> {
        let node = &definition.node;
        let frame = ScopeFrame::new(&definition.scope);
        let scope = Some(Rc::clone(&frame));
        let CallArguments { positional, mut keyword } = arguments;
        let mut positional = positional.into_iter();
        let mut take = |name: &str| {
            let index = keyword.iter().position(|argument| &*argument.name == name)?;
            Some(keyword.remove(index).value)
        };
        let mut values = Vec::with_capacity(node.parameters.len());
        for parameter in &node.parameters {
            values.push(positional.next().or_else(|| take(&parameter.name)));
        }
        let has_caller = node.parameters.iter().any(|parameter| &*parameter.name == "caller");
        if node.uses.caller && !has_caller {
            let caller = take("caller").filter(|caller| !matches!(caller, JinjaValue::None));
            let caller = caller.unwrap_or_else(|| JinjaValue::undefined("No caller defined"));
            frame.set(definition.special.caller, caller);
        }
        bind_rest(definition, keyword, positional.collect(), &frame)?;
        for (parameter, value) in node.parameters.iter().zip(values) {
            let value = match (value, &parameter.default) {
                (Some(value), _) => value,
                (None, Some(default)) => self.evaluate(default, &scope)?,
                (None, None) => JinjaValue::undefined(format!(
                    "parameter '{}' was not provided",
                    parameter.name
                )),
            };
            frame.set(parameter.id, value);
        }
        let text = self.capture(|evaluator| evaluator.execute(&node.body, &scope))?;
        Ok(JinjaValue::text(text))
    }

    fn call_function(
        &mut self,
        function: BuiltinFunction,
        arguments: CallArguments,
    ) -> JinjaResult<JinjaValue> {
        match function {
            BuiltinFunction::Range => range(arguments),
            BuiltinFunction::Dict => Ok(JinjaValue::dict(self.dict(arguments)?)),
            BuiltinFunction::Namespace => {
                let attributes = self.dict(arguments)?;
                self.new_namespace(attributes)
            }
            BuiltinFunction::Cycler => {
                if !arguments.keyword.is_empty() {
                    return Err(JinjaError::type_error("cycler() takes no keyword arguments"));
                }
                if arguments.positional.is_empty() {
                    return Err(JinjaError::runtime("at least one item has to be provided"));
                }
                let items = JinjaSequence::new(arguments.positional)?;
                Ok(JinjaValue::Cycler(Rc::new(CyclerValue { items, position: Cell::new(0) })))
            }
            BuiltinFunction::Joiner => {
                let [separator] = arguments.bind("joiner", ["sep"], 0)?;
                let separator = separator.unwrap_or_else(|| JinjaValue::text(", "));
                Ok(JinjaValue::Joiner(Rc::new(JoinerValue { separator, used: Cell::new(false) })))
            }
            BuiltinFunction::Lipsum => {
                Err(JinjaError::unsupported("lipsum() is unsupported, because its text is random"))
            }
            BuiltinFunction::RaiseException => {
                let [message] = arguments.bind("raise_exception", ["message"], 1)?;
                let message = self.str_of(&message.unwrap_or(JinjaValue::None))?;
                Err(JinjaError::new(JinjaErrorKind::Raised, &*message))
            }
            BuiltinFunction::StrftimeNow => {
                let [format] = arguments.bind("strftime_now", ["format"], 1)?;
                let format = text_argument("strftime", &format.unwrap_or(JinjaValue::None))?;
                self.charge(format.len())?;
                Ok(JinjaValue::text(self.strftime_now(&format)))
            }
        }
    }

    /// Creates a dict as Python's `dict` does: from a dict or a sequence of pairs, and from keyword
    /// arguments.
    fn dict(&mut self, arguments: CallArguments) -> JinjaResult<DictValue> {
        let CallArguments { mut positional, keyword } = arguments;
        if positional.len() > 1 {
            let given = positional.len();
            let message = format!("dict expected at most 1 argument, got {given}");
            return Err(JinjaError::type_error(message));
        }
        let mut dict = match positional.pop() {
            None => DictValue::default(),
            Some(JinjaValue::Dict(dict)) => {
                self.charge(dict.len() * 64)?;
                (*dict).clone()
            }
            Some(pairs) => self.dict_of_pairs(&pairs)?,
        };
        for KeywordArgumentValue { name, value } in keyword {
            dict.insert(JinjaValue::Str(name), value)?;
        }
        Ok(dict)
    }

    fn dict_of_pairs(&mut self, pairs: &JinjaValue) -> JinjaResult<DictValue> {
        let mut dict = DictValue::default();
        let mut pairs = ValueIterator::new(pairs)?;
        while let Some(pair) = pairs.next(self)? {
            self.charge(64)?;
            let items = self.collect(&pair)?;
            let [key, value]: [JinjaValue; 2] =
                items.try_into().map_err(|items: Vec<JinjaValue>| {
                    let length = items.len();
                    let message = format!(
                        "dictionary update sequence element has length {length}; 2 is required"
                    );
                    JinjaError::value_error(message)
                })?;
            dict.insert(key, value)?;
        }
        Ok(dict)
    }
}

fn range(arguments: CallArguments) -> JinjaResult<JinjaValue> {
    let [first, second, step] = arguments.bind_positional("range", 1)?;
    let first = integer_argument(&first.unwrap_or(JinjaValue::None))?;
    let second = second.as_ref().map(integer_argument).transpose()?;
    let step = step.as_ref().map_or(Ok(1), integer_argument)?;
    if step == 0 {
        return Err(JinjaError::value_error("range() arg 3 must not be zero"));
    }
    let (start, stop) = second.map_or((0, first), |stop| (first, stop));
    let range = RangeValue { start, stop, step };
    if range.len() > RANGE_MAX {
        let message = format!(
            "Range too big. The sandbox blocks ranges larger than MAX_RANGE ({RANGE_MAX})."
        );
        return Err(JinjaError::new(JinjaErrorKind::Overflow, message));
    }
    Ok(JinjaValue::Range(range))
}

/// Assigns the arguments of a macro call that match no parameter to the variables `kwargs` and `varargs`.
fn bind_rest(
    definition: &MacroValue,
    keyword: Vec<KeywordArgumentValue>,
    positional: Vec<JinjaValue>,
    frame: &ScopeFrame,
) -> JinjaResult<()> {
    let node = &definition.node;
    let name = node.name.as_deref().unwrap_or("None");
    if node.uses.kwargs {
        let mut rest = DictValue::default();
        for KeywordArgumentValue { name, value } in keyword {
            rest.insert(JinjaValue::Str(name), value)?;
        }
        frame.set(definition.special.kwargs, JinjaValue::dict(rest));
    } else if let Some(argument) = keyword.first() {
        let message = format!("macro '{name}' takes no keyword argument '{}'", argument.name);
        return Err(JinjaError::type_error(message));
    }
    if node.uses.varargs {
        frame.set(definition.special.varargs, JinjaValue::tuple(positional)?);
    } else if !positional.is_empty() {
        let count = node.parameters.len();
        let message = format!("macro '{name}' takes not more than {count} argument(s)");
        return Err(JinjaError::type_error(message));
    }
    Ok(())
}
