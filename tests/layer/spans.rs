//! Spans: what is inside them, their fields, and what happens if nobody wants them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tower::Layer;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::{DedupLayer, Deduplicator, Mode};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::with_default;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use support::log::{Fields, ask_all_subscribers};
use support::{by_header, dedup_key, request, send};

/// A span: its name, its parent, its fields.
#[derive(Debug, Clone, Default)]
struct Span {
    name: &'static str,
    level: String,
    parent: Option<u64>,
    fields: BTreeMap<String, String>,
}

/// Collects spans, and the span in which each event is.
#[derive(Clone)]
struct Spans(Arc<Mutex<Collected>>);

impl Default for Spans {
    fn default() -> Self {
        ask_all_subscribers();
        Self(Arc::default())
    }
}

#[derive(Default)]
struct Collected {
    spans: BTreeMap<u64, Span>,
    /// The message of each event, and the names of the spans around it.
    events: Vec<(String, Vec<&'static str>)>,
}

impl Spans {
    fn named(&self, name: &str) -> Vec<(u64, Span)> {
        let collected = self.0.lock().unwrap();
        let spans = collected.spans.iter().filter(|(_, span)| span.name == name);
        spans.map(|(id, span)| (*id, span.clone())).collect()
    }

    /// Returns the names of the spans around an event, the outermost first.
    fn around(&self, message: &str) -> Vec<&'static str> {
        let collected = self.0.lock().unwrap();
        let found = collected.events.iter().find(|(event, _)| event == message);
        found.unwrap_or_else(|| panic!("no event {message}")).1.clone()
    }
}

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> tracing_subscriber::Layer<S> for Spans {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let parent = context.span(id).and_then(|span| span.parent().map(|it| it.id().into_u64()));
        let (name, level) =
            (attributes.metadata().name(), attributes.metadata().level().to_string());
        let mut span = Span { name, level, parent, fields: BTreeMap::new() };
        attributes.record(&mut Fields(&mut span.fields));
        self.0.lock().unwrap().spans.insert(id.into_u64(), span);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        if let Some(span) = self.0.lock().unwrap().spans.get_mut(&id.into_u64()) {
            values.record(&mut Fields(&mut span.fields));
        }
    }

    fn on_event(&self, event: &tracing::Event<'_>, context: Context<'_, S>) {
        let mut fields = BTreeMap::new();
        event.record(&mut Fields(&mut fields));
        let around = context.event_scope(event).into_iter().flat_map(|scope| scope.from_root());
        let names = around.map(|span| span.name()).collect();
        self.0.lock().unwrap().events.push((fields["message"].clone(), names));
    }
}

/// Runs on one thread, and returns the spans. Those of the crate are there if they are wanted.
fn spans_of(are_wanted: bool, run: impl AsyncFnOnce()) -> Spans {
    let spans = Spans::default();
    let wanted = move |metadata: &tracing::Metadata<'_>| {
        are_wanted || !(metadata.is_span() && metadata.target() == "tower_dedup")
    };
    let subscriber = tracing_subscriber::registry().with(filter_fn(wanted)).with(spans.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    with_default(subscriber, || runtime.block_on(run()));
    spans
}

/// Sends one delivery inside a span of the request.
async fn send_in_a_span() {
    let layer = DedupLayer::new(by_header(), MemoryAdapter::new());
    let service = layer.layer(tower::service_fn(handle));
    let outer = tracing::info_span!("request");
    let sent = tracing::Instrument::instrument(send(&service, request("a")), outer);
    assert_eq!(sent.await.status(), 200);
}

/// A handler that logs before and after it has waited, so that the delivery moves to its task.
async fn handle<B>(
    _: http::Request<B>,
) -> Result<http::Response<String>, std::convert::Infallible> {
    tracing::info!("before");
    tokio::task::yield_now().await;
    tracing::info!("after");
    Ok(http::Response::new(String::new()))
}

#[test]
fn delivery_and_its_store_calls_are_spans_that_go_along_into_the_task() {
    let spans = spans_of(true, send_in_a_span);
    for message in ["before", "after"] {
        assert_eq!(spans.around(message), ["request", "delivery"], "{message}");
    }
    assert_eq!(spans.around("delivery"), ["request"], "the record has the fields itself");
    let deliveries = spans.named("delivery");
    let [(id, delivery)] = &deliveries[..] else { panic!("{deliveries:?}") };
    assert_eq!(delivery.level, "INFO");
    let expected = [
        ("attempt", "1".to_owned()),
        ("id", "a".to_owned()),
        ("namespace", "test".to_owned()),
        ("outcome", "completed".to_owned()),
    ];
    assert_eq!(delivery.fields, expected.map(|(name, value)| (name.to_owned(), value)).into());
    let calls = spans.named("store");
    let seen: Vec<_> = calls
        .iter()
        .map(|(_, call)| {
            assert_eq!((call.parent, &*call.level), (Some(*id), "DEBUG"));
            (&*call.fields["operation"], &*call.fields["result"])
        })
        .collect();
    assert_eq!(seen, [("claim", "ok"), ("complete", "ok")]);
}

#[test]
fn run_of_a_deduplicator_is_a_span_around_its_handler() {
    let spans = spans_of(true, async || {
        let dedup = Deduplicator::new(MemoryAdapter::new());
        let ran = dedup.run(dedup_key("a"), async |_| {
            tokio::task::yield_now().await;
            tracing::info!("handled");
            Ok::<_, ()>(())
        });
        ran.await.unwrap();
    });
    assert_eq!(spans.around("handled"), ["delivery"]);
    assert!(spans.around("delivery").is_empty(), "the record has the fields itself");
    let deliveries = spans.named("delivery");
    assert_eq!(deliveries[0].1.fields["outcome"], "completed");
    assert!(spans.named("store").iter().all(|(_, call)| call.parent == Some(deliveries[0].0)));
}

#[test]
fn without_the_spans_the_task_stays_in_the_span_of_the_request() {
    let spans = spans_of(false, send_in_a_span);
    for message in ["before", "after", "delivery"] {
        assert_eq!(spans.around(message), ["request"], "{message}");
    }
    assert!(spans.named("delivery").is_empty() && spans.named("store").is_empty());
}

#[test]
fn span_of_a_delivery_in_shadow_has_its_verdict() {
    let spans = spans_of(true, async || {
        let layer = DedupLayer::new(by_header(), MemoryAdapter::new()).mode(Mode::Shadow);
        let service = layer.layer(tower::service_fn(handle));
        for _ in 0..2 {
            send(&service, request("a")).await;
        }
    });
    assert_eq!(spans.around("after"), ["delivery"]);
    let deliveries = spans.named("delivery");
    let seen: Vec<_> = deliveries
        .iter()
        .map(|(_, span)| ["mode", "verdict", "outcome"].map(|field| &*span.fields[field]))
        .collect();
    assert_eq!(seen, [["shadow", "first", "completed"], ["shadow", "duplicate", "completed"]]);
}
