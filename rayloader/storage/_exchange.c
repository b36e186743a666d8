/* rayloader.storage._exchange: one request of HTTP/1.1 and its answer, without the GIL.
 *
 * exchange(fd, request, head, target) -> (came, read)
 *
 * Sends the request and receives until the answer's head has ended. If that says that a body of
 * exactly len(target) bytes follows, which is what was asked for, then that goes straight to target,
 * too. The caller looks at the head and makes sense of everything else; see http_client.exchange,
 * which does the same in Python and describes it.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static const char LENGTH[] = "\r\ncontent-length:";

/* 0, or -1 with errno. */
static int send_all(int fd, const char *bytes, Py_ssize_t count)
{
    while (count > 0) {
        ssize_t sent = send(fd, bytes, (size_t)count, MSG_NOSIGNAL);
        if (sent < 0 && errno != EINTR)
            return -1;
        if (sent > 0) {
            bytes += sent;
            count -= sent;
        }
    }
    return 0;
}

static ssize_t receive(int fd, char *target, Py_ssize_t count, int flags)
{
    ssize_t got;
    do
        got = recv(fd, target, (size_t)count, flags);
    while (got < 0 && errno == EINTR);
    return got;
}

/* Length of the body by a head that ends at `end`; -1: it is none that was hoped for. */
static long long hoped_length(char *head, char *end)
{
    if (strncmp(head, "HTTP/1.1 20", 11) || (head[11] != '0' && head[11] != '6'))
        return -1;
    char *value = strcasestr(head, LENGTH);
    if (!value || value > end || strcasestr(head, "\r\ntransfer-encoding:"))
        return -1;
    return strtoll(value + sizeof LENGTH - 1, NULL, 10);
}

/* Bytes that came with the head, or -1 with errno. */
static Py_ssize_t answered(int fd, char *head, Py_ssize_t room, char **end)
{
    Py_ssize_t came = 0;
    *end = NULL;
    while (!*end && came < room) {
        ssize_t got = receive(fd, head + came, room - came, 0);
        if (got < 0)
            return -1;
        if (got == 0)
            break;
        came += got;
        *end = memmem(head, (size_t)came, "\r\n\r\n", 4);
    }
    return came;
}

/* Fills target from what came with the head and from the socket. Bytes, or -1 with errno. */
static Py_ssize_t fill(int fd, const char *body, Py_ssize_t here, char *target, Py_ssize_t length)
{
    Py_ssize_t have = here < length ? here : length;
    memcpy(target, body, (size_t)have);
    while (have < length) {
        ssize_t got = receive(fd, target + have, length - have, MSG_WAITALL);
        if (got < 0)
            return -1;
        if (got == 0)
            break;
        have += got;
    }
    return have;
}

/* Bytes of the body that are in target; -1: none was hoped for; -2 with errno. */
static Py_ssize_t talk(int fd, const Py_buffer *request, const Py_buffer *head,
                       const Py_buffer *target, Py_ssize_t *came)
{
    char *end, *text = head->buf;
    *came = 0;
    if (send_all(fd, request->buf, request->len))
        return -2;
    *came = answered(fd, text, head->len, &end);
    if (*came < 0)
        return -2;
    if (!end || !target->obj)
        return -1;
    *end = 0; /* what is searched ends there */
    long long length = hoped_length(text, end);
    *end = '\r';
    if (length != target->len)
        return -1;
    char *body = end + 4;
    Py_ssize_t read = fill(fd, body, *came - (body - text), target->buf, target->len);
    return read < 0 ? -2 : read;
}

static PyObject *exchange(PyObject *module, PyObject *args)
{
    int fd;
    PyObject *into;
    Py_buffer request, head, target = {0};
    Py_ssize_t came, read;
    (void)module;
    if (!PyArg_ParseTuple(args, "iy*w*O", &fd, &request, &head, &into))
        return NULL;
    PyObject *result = NULL;
    if (into == Py_None || !PyObject_GetBuffer(into, &target, PyBUF_WRITABLE)) {
        Py_BEGIN_ALLOW_THREADS
        read = talk(fd, &request, &head, &target, &came);
        Py_END_ALLOW_THREADS
        if (read == -2)
            PyErr_SetFromErrno(PyExc_OSError);
        else
            result = Py_BuildValue("nn", came, read);
        if (target.obj)
            PyBuffer_Release(&target);
    }
    PyBuffer_Release(&head);
    PyBuffer_Release(&request);
    return result;
}

static PyMethodDef methods[] = {{"exchange", exchange, METH_VARARGS, NULL}, {0}};

static PyModuleDef_Slot module_slots[] = {{0, NULL}};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_exchange",
    .m_doc = "A request of HTTP/1.1 and its answer.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__exchange(void) { return PyModuleDef_Init(&module); }
