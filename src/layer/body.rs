//! Bodies: [`Collect`] buffers the request's; [`ResponseBody`] is the response's.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
#[cfg(feature = "axum")]
use http::{Extensions, Request};
use http_body::{Body, Frame, SizeHint};
use http_body_util::LengthLimitError;
use pin_project_lite::pin_project;
use tokio::time::{Sleep, timeout};

use crate::error::BoxError;
use crate::observe::Outcome;
use crate::replay::TOO_LONG;

pin_project! {
    /// The body of a response: the inner service's, or the layer's own.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        // `None` for a response of the layer's own.
        #[pin]
        inner: Option<B>,
        // Boxed, because most responses have none.
        read: Option<Box<Read<B>>>,
    }
}

/// The part of a body that the layer has read, or a body of the layer's own.
#[derive(Debug)]
struct Read<B> {
    first: Bytes,
    trailers: Option<HeaderMap>,
    /// The unread rest.
    rest: Option<Pin<Box<B>>>,
}

impl<B> ResponseBody<B> {
    pub(crate) fn inner(body: B) -> Self {
        Self { inner: Some(body), read: None }
    }

    /// Returns the inner service's body.
    pub(super) fn into_inner(self) -> Option<B> {
        self.inner
    }

    /// Returns a body of these bytes.
    pub(crate) fn full(bytes: Bytes) -> Self {
        if bytes.is_empty() { Self::default() } else { Self::read(bytes, None, None) }
    }

    fn read(first: Bytes, trailers: Option<HeaderMap>, rest: Option<Pin<Box<B>>>) -> Self {
        Self { inner: None, read: Some(Box::new(Read { first, trailers, rest })) }
    }
}

/// An empty body of the layer's own.
impl<B> Default for ResponseBody<B> {
    fn default() -> Self {
        Self { inner: None, read: None }
    }
}

impl<B: Body<Data = Bytes>> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.project();
        if let Some(body) = this.inner.as_pin_mut() {
            return body.poll_frame(cx);
        }
        let Some(read) = this.read else { return Poll::Ready(None) };
        if !read.first.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut read.first)))));
        }
        if let Some(rest) = &mut read.rest {
            return rest.as_mut().poll_frame(cx);
        }
        Poll::Ready(read.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        match (&self.inner, &self.read) {
            (Some(body), _) => body.is_end_stream(),
            (None, Some(read)) => {
                read.first.is_empty()
                    && read.trailers.is_none()
                    && read.rest.as_ref().is_none_or(|rest| rest.is_end_stream())
            }
            (None, None) => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.inner, &self.read) {
            (Some(body), _) => body.size_hint(),
            (None, Some(read)) => {
                let first = read.first.len() as u64;
                let rest = read.rest.as_ref().map_or(SizeHint::with_exact(0), |r| r.size_hint());
                let mut hint = SizeHint::new();
                hint.set_lower(first.saturating_add(rest.lower()));
                // A server sends no trailers after a body of known length.
                if let (Some(upper), None) = (rest.upper(), &read.trailers) {
                    hint.set_upper(first.saturating_add(upper));
                }
                hint
            }
            (None, None) => SizeHint::with_exact(0),
        }
    }
}

/// The bytes of a body that is to be stored, or the reason why it cannot be stored; and a body that
/// sends it from its beginning.
type Buffered<B> = (Result<Bytes, &'static str>, ResponseBody<B>);

/// Reads a response's body, up to `limit` bytes and for `time`.
pub(super) async fn buffer_response<B: Body<Data = Bytes>>(
    body: B,
    limit: usize,
    time: Duration,
) -> Result<Buffered<B>, B::Error> {
    const SLOW: &str = "its body took too long";
    const TRAILERS: &str = "it has trailers";
    let mut body = Box::pin(body);
    let (mut all, mut trailers) = (BytesMut::new(), None);
    let read = async {
        if body.size_hint().lower() > u64::try_from(limit).unwrap_or(u64::MAX) {
            return Ok(Err(TOO_LONG));
        }
        while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await.transpose()? {
            match frame.into_data() {
                Ok(data) => all.extend_from_slice(&data),
                // Trailers are the last frame.
                Err(frame) => {
                    trailers = frame.into_trailers().ok();
                    break;
                }
            }
            if all.len() > limit {
                return Ok(Err(TOO_LONG));
            }
        }
        Ok(Ok(()))
    };
    let read = timeout(time, read).await.unwrap_or(Ok(Err(SLOW)))?;
    let all = all.freeze();
    let trailers = trailers.filter(|trailers: &HeaderMap| !trailers.is_empty());
    let (stored, rest) = match read {
        Err(reason) => (Err(reason), Some(body)),
        Ok(()) if trailers.is_some() => (Err(TRAILERS), None),
        Ok(()) => (Ok(all.clone()), None),
    };
    Ok((stored, ResponseBody::read(all, trailers, rest)))
}

/// The default of the largest request body, in bytes.
pub(crate) const BODY_LIMIT: usize = 2 * 1024 * 1024;
/// Raises axum's default limit to a layer's `limit`, because axum's extractors refuse bodies above
/// 2 MB by default. A limit that the application has set stays.
#[cfg(feature = "axum")]
pub(super) fn raise_limit_of_axum(extensions: &mut Extensions, limit: usize) {
    let mut raised = Request::new(());
    raised.extensions_mut().clone_from(extensions);
    axum_core::extract::DefaultBodyLimit::max(limit).apply(&mut raised);
    // The type of the extension is private to axum. With a limit of the application, there is none
    // more.
    if raised.extensions().len() > extensions.len() {
        std::mem::swap(raised.extensions_mut(), extensions);
    }
}

/// The default of the time in which a request body must arrive.
pub(crate) const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a request's body was not read to its end.
#[derive(Debug)]
pub(crate) enum BodyFault {
    TooLarge,
    Broken(BoxError),
    Slow,
}

impl BodyFault {
    pub(crate) const fn outcome(&self) -> Outcome {
        match self {
            Self::TooLarge => Outcome::TooLarge,
            Self::Broken(_) => Outcome::BrokenBody,
            Self::Slow => Outcome::SlowBody,
        }
    }
}

impl fmt::Display for BodyFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TooLarge => "the body is too large",
            Self::Broken(_) => "the body ended in an error",
            Self::Slow => "the body did not arrive in time",
        })
    }
}

pin_project! {
    /// Collects a body into one buffer. A body of one buffer is not copied. Trailers are dropped.
    pub(crate) struct Collect<R> {
        #[pin]
        body: R,
        // How many bytes may still come.
        left: usize,
        time: Duration,
        // Set at the first wait, because most bodies arrive with their request.
        deadline: Option<Pin<Box<Sleep>>>,
        // The only buffer so far.
        first: Bytes,
        // All buffers, from the second one on.
        all: Option<BytesMut>,
    }
}

impl<R> Collect<R>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    pub(crate) fn new(body: R, limit: usize, time: Duration) -> Self {
        Self { body, left: limit, time, deadline: None, first: Bytes::new(), all: None }
    }

    pub(crate) fn poll(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Bytes, BodyFault>> {
        let mut this = self.project();
        // Most bodies announce their length: one that is too large is not read.
        let is_unread = this.first.is_empty();
        if is_unread && this.body.size_hint().lower() > *this.left as u64 {
            return Poll::Ready(Err(BodyFault::TooLarge));
        }
        loop {
            let frame = match this.body.as_mut().poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(fault(error.into()))),
                Poll::Ready(None) => break,
                Poll::Pending => {
                    let time = *this.time;
                    let sleep =
                        this.deadline.get_or_insert_with(|| Box::pin(tokio::time::sleep(time)));
                    ready!(sleep.as_mut().poll(cx));
                    return Poll::Ready(Err(BodyFault::Slow));
                }
            };
            let Ok(data) = frame.into_data() else { continue };
            let Some(left) = this.left.checked_sub(data.len()) else {
                return Poll::Ready(Err(BodyFault::TooLarge));
            };
            *this.left = left;
            if let Some(all) = this.all {
                all.extend_from_slice(&data);
            } else if this.first.is_empty() {
                *this.first = data;
            } else {
                let mut all = BytesMut::with_capacity(this.first.len() + data.len());
                all.extend_from_slice(this.first);
                all.extend_from_slice(&data);
                *this.all = Some(all);
            }
        }
        let first = std::mem::take(this.first);
        Poll::Ready(Ok(this.all.take().map_or(first, BytesMut::freeze)))
    }
}

impl std::error::Error for BodyFault {}

/// Returns the fault that a layer around this one has found, and `TooLarge` if a limit of an outer
/// layer caused the error.
fn fault(error: BoxError) -> BodyFault {
    let error = match error.downcast() {
        Ok(fault) => return *fault,
        Err(error) => error,
    };
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(&*error);
    while let Some(cause) = next {
        if cause.is::<LengthLimitError>() {
            return BodyFault::TooLarge;
        }
        next = cause.source();
    }
    BodyFault::Broken(error)
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, Full};

    use super::*;

    type Response = ResponseBody<Full<Bytes>>;

    /// A server reads no further frame of a body that has ended.
    #[tokio::test]
    async fn body_has_ended_after_its_last_frame_and_not_before() {
        let rest = |bytes: &'static str| Some(Box::pin(Full::from(bytes)));
        let trailers = || Some(HeaderMap::new());
        for (mut body, frames) in [
            (Response::default(), 0),
            (Response::inner(Full::default()), 0),
            (Response::inner(Full::from("a")), 1),
            (Response::full(Bytes::new()), 0),
            (Response::full("a".into()), 1),
            (Response::read(Bytes::new(), trailers(), None), 1),
            (Response::read("a".into(), trailers(), None), 2),
            (Response::read(Bytes::new(), None, rest("b")), 1),
            (Response::read("a".into(), None, rest("b")), 2),
            (Response::read("a".into(), None, rest("")), 1),
        ] {
            for left in (1..=frames).rev() {
                assert!(!body.is_end_stream(), "{left} frames are left of {body:?}");
                assert!(body.frame().await.is_some());
            }
            assert!(body.is_end_stream(), "{body:?}");
            assert!(body.frame().await.is_none());
        }
    }
}
