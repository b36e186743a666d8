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
#include <string.h>
#include <sys/socket.h>

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

static char lower(char c) { return c >= 'A' && c <= 'Z' ? (char)(c + 'a' - 'A') : c; }

/* The value of the first field of this name, which is in lower case; NULL: there is none. */
static const char *field(const char *head, const char *end, const char *name)
{
    for (; (head = memmem(head, (size_t)(end - head), "\r\n", 2)); head += 2) {
        const char *at = head + 2, *letter = name;
        while (at < end && *letter && lower(*at) == *letter) {
            at++;
            letter++;
        }
        if (!*letter)
            return at;
    }
    return NULL;
}

/* Length of the body by a head that ends at `end`, with an empty line; -1: none was hoped for. */
static long long hoped_length(const char *head, const char *end)
{
    if (end - head < 12 || memcmp(head, "HTTP/1.", 7) || (head[7] != '0' && head[7] != '1') ||
        memcmp(head + 8, " 20", 3) || (head[11] != '0' && head[11] != '6'))
        return -1;
    const char *value = field(head, end, "content-length:");
    if (!value || field(head, end, "transfer-encoding:"))
        return -1;
    long long length = 0;
    int digits = 0;
    for (; *value == ' '; value++)
        ;
    for (; *value >= '0' && *value <= '9' && digits < 18; value++, digits++)
        length = 10 * length + (*value - '0');
    for (; *value == ' '; value++)
        ;
    return digits && !memcmp(value, "\r\n", 2) ? length : -1;
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
    if (hoped_length(text, end) != target->len)
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
