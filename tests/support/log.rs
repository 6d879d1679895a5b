//! The log records of the crate, for tests.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex};

use tracing::Dispatch;
use tracing::field::{Field, Visit};
use tracing::subscriber::{DefaultGuard, NoSubscriber};
use tracing_subscriber::layer::SubscriberExt;

/// Collects the log records of the layer, and of an inbox around it.
#[derive(Clone)]
pub struct Log(Arc<Mutex<Vec<BTreeMap<String, String>>>>);

impl Default for Log {
    fn default() -> Self {
        ask_all_subscribers();
        Self(Arc::default())
    }
}

/// Lets a subscriber of this thread see its records whatever other threads do.
///
/// While the process has one subscriber, `tracing` asks only the thread that sends a kind of record for the
/// first time whether anyone wants that kind. If that thread has no subscriber, the records of all threads
/// are lost. With a second subscriber, `tracing` asks all.
pub fn ask_all_subscribers() {
    static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));
    LazyLock::force(&SECOND);
}

impl Log {
    /// Returns the log records with this message.
    pub fn all(&self, message: &str) -> Vec<BTreeMap<String, String>> {
        let events = self.0.lock().unwrap();
        events.iter().filter(|event| event["message"] == message).cloned().collect()
    }

    /// Returns the log records whose message begins so.
    pub fn beginning(&self, message: &str) -> Vec<BTreeMap<String, String>> {
        let events = self.0.lock().unwrap();
        events.iter().filter(|event| event["message"].starts_with(message)).cloned().collect()
    }

    pub fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Collects the log records of this thread, until the guard is dropped.
    pub fn of_this_thread() -> (Self, DefaultGuard) {
        let log = Self::default();
        let subscriber = tracing_subscriber::registry().with(log.clone());
        (log, tracing::subscriber::set_default(subscriber))
    }

    /// Returns the last log record with this message.
    pub fn last(&self, message: &str) -> BTreeMap<String, String> {
        let events = self.0.lock().unwrap();
        let found = events.iter().rev().find(|event| event["message"] == message);
        found.unwrap_or_else(|| panic!("no event {message:?}")).clone()
    }
}

pub struct Fields<'a>(pub &'a mut BTreeMap<String, String>);

impl Visit for Fields<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Log {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        if !["tower_dedup", "tower_dedup_inbox"].contains(&event.metadata().target()) {
            return;
        }
        let mut fields = BTreeMap::new();
        fields.insert("level".to_owned(), event.metadata().level().to_string());
        event.record(&mut Fields(&mut fields));
        self.0.lock().unwrap().push(fields);
    }
}
