//! [`Naming`]: what an extractor adds to the ids that its rule finds.

use std::borrow::Cow;
use std::sync::Arc;

use super::digest::sha256_hex;
use super::id::{MAX_NAMESPACE_LEN, check_namespace, is_blank};
use super::part::KeyPart;
use super::request::RequestRef;
use crate::error::{ConfigError, KeyError, KeyErrorKind, check};

type NamespaceFn = dyn Fn(&RequestRef<'_>) -> Option<String> + Send + Sync;

/// What an extractor adds to the namespace and to the ids that its rule finds.
#[derive(Clone, Default)]
pub(super) struct Naming {
    /// Reads a value that each namespace gets.
    pub(super) by: Option<Arc<NamespaceFn>>,
    pub(super) second: Option<Second>,
    /// Reads the type of an event to which the rule gives none.
    pub(super) event_type: Option<KeyPart>,
}

/// A second identity.
#[derive(Clone)]
pub(super) struct Second {
    label: Arc<str>,
    pub(super) part: KeyPart,
    /// Whether the part is a digest of the body.
    pub(super) is_content: bool,
}

impl Naming {
    pub(super) fn set_second(&mut self, label: &str, part: KeyPart, is_content: bool) {
        self.second = Some(Second { label: label.into(), part, is_content });
    }

    pub(super) fn check(&self, namespace: &str) -> Result<(), ConfigError> {
        // Its ids could be those of content identities of another layer.
        let rule = "a text that does not end with `.body`: such namespaces have content identities";
        check(!namespace.ends_with(".body"), "namespace", rule, &namespace)?;
        let mut longest = Cow::Borrowed(namespace);
        if let Some(Second { label, part, is_content }) = &self.second {
            longest = self.second_namespace(namespace);
            check_namespace(&longest)?;
            let is_label = !label.is_empty() && !label.contains('.');
            check(is_label, "label", "a text without `.`", label)?;
            if !is_content && part.reads_body_digest() {
                let rule = "a digest of the body is a `content_identity`";
                return Err(ConfigError::new(rule));
            }
        }
        if self.by.is_some() {
            let fits = escaped(&longest).len() <= MAX_SCOPED_LEN;
            check(fits, "namespace", "at most 47 bytes under `namespace_by`", &longest)?;
        }
        let mut parts = self.event_type.iter().chain(self.second.iter().map(|it| &it.part));
        parts.find_map(KeyPart::fault).map_or(Ok(()), |fault| Err(fault.clone()))
    }

    /// Returns the namespaces of a request's keys and of their second identities.
    ///
    /// The second namespace is empty if there are no second identities.
    pub(super) fn namespaces<'n>(
        &self,
        namespace: &'n str,
        request: &RequestRef<'_>,
    ) -> Result<[Cow<'n, str>; 2], KeyError> {
        let namespaces = [namespace.into(), self.second_namespace(namespace)];
        let Some(read) = &self.by else { return Ok(namespaces) };
        let value = read(request).filter(|value| !is_blank(value));
        let value =
            value.ok_or_else(|| KeyError::new(KeyErrorKind::Missing, "the namespace's value"))?;
        Ok(namespaces.map(|namespace| scoped(&namespace, &value).into()))
    }

    fn second_namespace(&self, namespace: &str) -> Cow<'static, str> {
        let joined = |second: &Second| format!("{namespace}.{}", second.label);
        self.second.as_ref().map(joined).unwrap_or_default().into()
    }
}

/// The longest namespace, escaped, to which the digest of a value can be added.
const MAX_SCOPED_LEN: usize = MAX_NAMESPACE_LEN - 1 - VALUE_DIGITS;
const VALUE_DIGITS: usize = 16;

fn scoped(namespace: &str, value: &str) -> String {
    let namespace = escaped(namespace);
    let scoped = format!("{namespace}:{value}");
    if check_namespace(&scoped).is_ok() && !is_digest(value) {
        return scoped;
    }
    format!("{namespace}:{}", &sha256_hex(value.as_bytes())[..VALUE_DIGITS])
}

/// Escapes `%` and `:`, so that the first `:` of the joined namespace ends this one.
fn escaped(namespace: &str) -> Cow<'_, str> {
    if !namespace.contains(['%', ':']) {
        return namespace.into();
    }
    namespace.replace('%', "%25").replace(':', "%3A").into()
}

/// Returns `true` if the value looks like the digest of another value.
fn is_digest(value: &str) -> bool {
    value.len() == VALUE_DIGITS
        && value.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}
