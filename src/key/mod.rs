//! Keys: what makes two deliveries the same event, and where it is read.
//!
//! 1. A [`DedupKey`] is a namespace and an id. The namespace (a provider, or an endpoint) lets one
//!    table serve every integration: two senders may number their events alike.
//! 2. A [`KeyPart`] reads one value: [`header`], [`json`], [`form`], [`query`], [`body_digest`] or
//!    a closure ([`from_fn`]). Parts are composed with [`and`](KeyPart::and) (all of them),
//!    [`or`](KeyPart::or) (the first that is present) and [`optional`](KeyPart::optional).
//! 3. [`namespace`](KeyPart::namespace) makes a [`KeyExtractor`] of it, which is what the layer
//!    takes. It answers keys, *bypass* (a handshake) or *missing*.
//! 4. [`each`] reads a part from every event of a JSON array: a [`Batch`], with a key for each.
//! 5. A value that is there but repeated, empty, not UTF-8, or holds a NUL is malformed: the layer
//!    answers 400 and records nothing. It is never guessed at.
//! 6. In a composed id, `%` and `|` inside a part are written `%25` and `%7C`, and the parts are
//!    joined with `|`: two different lists of parts never give one id, and the id stays readable.
//! 7. An id over 255 bytes is replaced by its SHA-256 (64 lower-case hex digits), so that every
//!    store can index it.
//!
//! The alternatives of an [`or`](KeyPart::or) share one id space: put together only places that
//! carry the same id.
//!
//! # Example
//!
//! ```
//! use http::Request;
//! use tower_dedup::key::{self, Extracted};
//!
//! let extractor = key::header("x-shop").and(key::json("/event/id")).namespace("acme");
//! let (head, body) = Request::post("/hook")
//!     .header("x-shop", "a|b")
//!     .body(r#"{"event":{"id":17}}"#.into())
//!     .unwrap()
//!     .into_parts();
//! match extractor.extract(&key::RequestRef::new(&head, &body)).unwrap() {
//!     Extracted::Keys(keys) => assert_eq!(keys.events()[0].key().id(), "a%7Cb|17"),
//!     other => panic!("{other:?}"),
//! }
//! ```

mod batch;
mod digest;
mod extractor;
mod form;
mod header;
mod id;
mod json;
mod list;
mod part;
mod query;

pub use batch::{Batch, each};
pub(crate) use batch::{Items, events};
#[cfg(feature = "sqlite")]
pub(crate) use digest::hex;
pub(crate) use digest::{body_id, derive};
pub use extractor::{Extracted, KeyExtractor, RequestRef};
pub(crate) use extractor::{Found, Reader};
pub use id::{DedupKey, Event, Keys, MAX_ID_LEN};
pub use json::Pointer;
pub(crate) use list::List;
pub(crate) use part::compose;
pub use part::{KeyPart, body_digest, form, from_fn, header, json, query};
