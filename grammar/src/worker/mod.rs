//! Dry run of a grammar: before the server compiles a grammar, a worker process compiles it and generates
//! some of its texts.
//!
//! llguidance's limits do not bound all of its work, a thread cannot be stopped, and a thread's memory
//! belongs to the whole process. A process can be killed. Therefore each grammar first runs in a child
//! process with low priority and bounded memory. If the child exceeds its time, it is killed and the grammar
//! is rejected. After a successful dry run, the server compiles the grammar again with the same code, at a
//! known cost. A compiled grammar cannot be sent between processes, because it is a graph of tables that grow
//! while masks are computed, without a serialised form.
//!
//! The child process runs the `hadron` executable as `hadron grammar-worker`. Its standard input is a socket,
//! on which it receives the vocabulary once and then one grammar at a time, with a reply to each grammar
//! before the next. The child has no tokenizer: it tokenizes forced text greedily, taking the longest
//! matching token.

mod child;
mod message;
mod process;
mod starvation_watchdog;

pub use child::serve;
pub(super) use message::vocabulary_frame;
pub(super) use process::GrammarWorkerProcess;
