//! Keys: how the layer recognises that two deliveries carry the same event.
//!
//! 1. A [`DedupKey`] is a namespace and an id. The namespace is a provider or an endpoint, so that
//!    one table serves every integration: two senders may use the same ids.
//! 2. A [`KeyPart`] reads one value: [`header`], [`json`], [`form`], [`query`], [`body_digest`] or
//!    a closure ([`from_fn`]). Parts are composed with [`and`](KeyPart::and) (all of them),
//!    [`or`](KeyPart::or) (the first that is present) and [`optional`](KeyPart::optional).
//! 3. [`namespace`](KeyPart::namespace) turns a part into a [`KeyExtractor`], which the layer
//!    takes. An extractor returns keys, *bypass* (no event) or *missing*.
//! 4. [`each`] makes an [`EachKey`]: it reads a part from every event of a JSON array.
//! 5. A value is malformed if it is repeated, empty, blank or not UTF-8, or contains a NUL. The
//!    layer answers 400 and claims nothing, because a guess could lose an event. In an
//!    [`optional`](KeyPart::optional) part, and in a part that an [`or`](KeyPart::or) follows, a
//!    blank value counts as missing.
//! 6. In a composed id, `%` and `|` inside a part are written `%25` and `%7C`, and `|` joins the
//!    parts. So two different lists of parts never give one id, and the id stays readable.
//! 7. An id over 255 bytes is replaced by its SHA-256 (64 lower-case hex digits), so that every
//!    store can index it.
//!
//! The alternatives of an [`or`](KeyPart::or) share one id space. So combine only places that carry
//! the same id.
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

mod digest;
mod each;
mod event_part;
mod events;
pub(crate) mod extractor;
mod field;
pub(crate) mod id;
mod idempotency;
mod json;
mod naming;
mod part;
mod request;

pub(crate) use digest::{body_id, derive, hex, sha256};
pub use each::{EachKey, each};
pub(crate) use event_part::{EventPart, FoundId};
pub(crate) use events::Events;
pub use events::Extracted;
pub use extractor::IntoKeyExtractor;
pub(crate) use extractor::{KeyExtractor, Rule};
pub(crate) use id::{DedupKey, List, LogIds, escaped, event_type, is_hidden};
pub use id::{Event, Keys};
pub(crate) use idempotency::whole_payload;
pub(crate) use json::{Arrays, is_array, items, lists, without_mark};
pub(crate) use part::compose;
pub use part::{KeyPart, body_digest, form, from_fn, header, json, query};
pub(crate) use request::FORM;
pub use request::RequestRef;
