/* rayloader.storage._native: the POSIX engine (_engine.c) for Python.
 *
 * class Engine; its methods are those of _engine.h and are described by posix.Engine. Batches cross
 * the border as buffers of int64 and int32; no Python object is made per file. Misuse raises
 * rayloader.errors.UsageError.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "_engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    PyObject_HEAD
    engine *core; /* NULL: closed */
    Py_buffer memory;
    int attached;
} Engine;

static PyObject *usage_error; /* rayloader.errors.UsageError */

static PyObject *refuse(const char *text)
{
    PyErr_SetString(usage_error, text);
    return NULL;
}

/* The engine, or NULL with an exception when it is closed or belongs to another process. */
static engine *core_of(Engine *self)
{
    if (!self->core)
        refuse("the engine is closed");
    else if (engine_pid(self->core) != (int)getpid())
        refuse("the engine belongs to the process that opened it, not to a forked child");
    else
        return self->core;
    return NULL;
}

/* A view of C-contiguous int64; the caller releases it. */
static int int64_view(PyObject *source, Py_buffer *view)
{
    if (PyObject_GetBuffer(source, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT))
        return -1;
    const char *format = view->format ? view->format : "B";
    if (view->itemsize == 8 && view->ndim == 1 && strchr("lqn", format[0]) && !format[1])
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_TypeError, "expected a one-dimensional buffer of int64");
    return -1;
}

static int Engine_init(Engine *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"concurrency", "cpus", "part_bytes", "scratch_part_bytes",
                            "direct", "drop_cache", "fd_budget", NULL};
    int concurrency, cpus, direct, drop_cache, error;
    long long part, scratch_part, fd_budget;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$iiLLipL", names, &concurrency, &cpus, &part,
                                     &scratch_part, &direct, &drop_cache, &fd_budget))
        return -1;
    if (self->core) {
        refuse("the engine is open");
        return -1;
    }
    if (concurrency < 1 || cpus < 1 || part < 4096 || part % 4096 || scratch_part < 4096 ||
        scratch_part % 4096 || direct < DIRECT_NO || direct > DIRECT_PREFERRED || fd_budget < 0) {
        refuse("an option of the engine is out of range");
        return -1;
    }
    engine_options options = {concurrency, cpus, part, scratch_part, direct, drop_cache, fd_budget};
    self->core = engine_open(&options, &error);
    if (self->core)
        return 0;
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

static PyObject *Engine_fileno(Engine *self, PyObject *none)
{
    (void)none;
    engine *e = core_of(self);
    return e ? PyLong_FromLong(engine_fileno(e)) : NULL;
}

static PyObject *Engine_attach(Engine *self, PyObject *memory)
{
    engine *e = core_of(self);
    if (!e)
        return NULL;
    if (self->attached)
        return refuse("memory is attached already");
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE))
        return NULL;
    if (engine_attach(e, self->memory.buf, self->memory.len)) {
        PyBuffer_Release(&self->memory);
        return refuse("O_DIRECT needs memory that begins at a multiple of 4096");
    }
    self->attached = 1;
    Py_RETURN_NONE;
}

static PyObject *measure_failed(int error, long long group)
{
    if (error == EEXIST)
        return PyErr_Format(usage_error, "group %lld is in use", group);
    if (error == ERANGE)
        return PyErr_Format(usage_error, "offsets do not fit the names");
    if (error == ENOMEM)
        return PyErr_NoMemory();
    if (error == EAGAIN)
        return PyErr_Format(PyExc_OSError, "the system gives no thread to read with");
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *Engine_measure(Engine *self, PyObject *args)
{
    long long group;
    Py_buffer root, blob, offsets;
    PyObject *offsets_source;
    engine *e = core_of(self);
    if (!e || !PyArg_ParseTuple(args, "Ly*y*O", &group, &root, &blob, &offsets_source))
        return NULL;
    int error = int64_view(offsets_source, &offsets);
    if (!error) {
        error = offsets.len < 8 ? ERANGE
                                : engine_measure(e, group, root.buf, root.len, blob.buf, blob.len,
                                                 offsets.buf, offsets.len / 8 - 1);
        PyBuffer_Release(&offsets);
    }
    PyBuffer_Release(&root);
    PyBuffer_Release(&blob);
    if (PyErr_Occurred())
        return NULL;
    if (error)
        return measure_failed(error, group);
    Py_RETURN_NONE;
}

static PyObject *fetch_failed(int error, long long group, long long bad)
{
    if (error == ENOENT)
        return PyErr_Format(usage_error, "group %lld is not a measured one", group);
    if (error == EINVAL)
        return PyErr_Format(usage_error, "group %lld has another number of objects", group);
    if (error == ERANGE)
        return PyErr_Format(usage_error,
                            "object %lld of group %lld cannot be read there: it was not measured, "
                            "or the place is not aligned or leaves no room",
                            bad, group);
    return measure_failed(error, group);
}

static PyObject *Engine_fetch(Engine *self, PyObject *args)
{
    long long group;
    int64_t bad = -1;
    Py_buffer places;
    PyObject *source;
    engine *e = core_of(self);
    if (!e || !PyArg_ParseTuple(args, "LO", &group, &source) || int64_view(source, &places))
        return NULL;
    int error = engine_fetch(e, group, places.buf, places.len / 8, &bad);
    PyBuffer_Release(&places);
    if (error)
        return fetch_failed(error, group, bad);
    Py_RETURN_NONE;
}

/* As many int64 as there are names. */
static int column_view(PyObject *source, Py_ssize_t n, Py_buffer *view)
{
    if (int64_view(source, view))
        return -1;
    if (view->len == 8 * n)
        return 0;
    PyBuffer_Release(view);
    refuse("a group has as many sizes and places as names");
    return -1;
}

static PyObject *read_group(engine *e, long long group, const Py_buffer *root,
                            const Py_buffer *blob, const Py_buffer *offsets,
                            PyObject *sizes_source, PyObject *places_source)
{
    int64_t bad = -1;
    Py_ssize_t n = offsets->len / 8 - 1;
    Py_buffer sizes, places;
    if (n < 0)
        return measure_failed(ERANGE, group);
    if (column_view(sizes_source, n, &sizes))
        return NULL;
    if (column_view(places_source, n, &places)) {
        PyBuffer_Release(&sizes);
        return NULL;
    }
    int error = engine_read(e, group, root->buf, root->len, blob->buf, blob->len, offsets->buf,
                            sizes.buf, places.buf, n, &bad);
    PyBuffer_Release(&places);
    PyBuffer_Release(&sizes);
    if (error == EDOM)
        return fetch_failed(ERANGE, group, bad);
    if (error)
        return measure_failed(error, group);
    Py_RETURN_NONE;
}

static PyObject *Engine_read(Engine *self, PyObject *args)
{
    long long group;
    Py_buffer root, blob, offsets;
    PyObject *offsets_source, *sizes_source, *places_source, *result = NULL;
    engine *e = core_of(self);
    if (!e || !PyArg_ParseTuple(args, "Ly*y*OOO", &group, &root, &blob, &offsets_source,
                                &sizes_source, &places_source))
        return NULL;
    if (!int64_view(offsets_source, &offsets)) {
        result = read_group(e, group, &root, &blob, &offsets, sizes_source, places_source);
        PyBuffer_Release(&offsets);
    }
    PyBuffer_Release(&root);
    PyBuffer_Release(&blob);
    return result;
}

static PyObject *Engine_is_calm(Engine *self, PyObject *none)
{
    (void)none;
    engine *e = core_of(self);
    return e ? PyBool_FromLong(engine_is_calm(e)) : NULL;
}

static PyObject *Engine_discard(Engine *self, PyObject *number)
{
    engine *e = core_of(self);
    long long group = e ? PyLong_AsLongLong(number) : -1;
    if (!e || PyErr_Occurred())
        return NULL;
    engine_discard(e, group);
    Py_RETURN_NONE;
}

static PyObject *Engine_settled(Engine *self, PyObject *args)
{
    engine *e = core_of(self);
    PyObject *number = Py_None;
    if (!e || !PyArg_ParseTuple(args, "|O", &number))
        return NULL;
    int64_t group = number == Py_None ? 0 : PyLong_AsLongLong(number);
    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(engine_settled(e, number == Py_None ? NULL : &group));
}

/* (number, sizes: int64 bytes, codes: int32 bytes or None when all went well) */
static PyObject *result_of(const group *g)
{
    int64_t n = group_count(g);
    PyObject *sizes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(n * 8));
    PyObject *codes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(n * 4));
    if (!sizes || !codes) {
        Py_XDECREF(sizes);
        Py_XDECREF(codes);
        return NULL;
    }
    int64_t failed = group_results(g, (int64_t *)(void *)PyBytes_AsString(sizes),
                                   (int32_t *)(void *)PyBytes_AsString(codes));
    if (!failed) {
        Py_DECREF(codes);
        Py_INCREF(Py_None);
        codes = Py_None;
    }
    return Py_BuildValue("LNN", (long long)group_number(g), sizes, codes);
}

static PyObject *Engine_collect(Engine *self, PyObject *none)
{
    (void)none;
    engine *e = core_of(self);
    PyObject *list = e ? PyList_New(0) : NULL;
    if (!list)
        return NULL;
    for (group *g = engine_collect(e), *next; g; g = next) {
        next = group_next(g);
        PyObject *result = PyErr_Occurred() ? NULL : result_of(g);
        if (result)
            PyList_Append(list, result);
        Py_XDECREF(result);
        engine_release(g);
    }
    if (!PyErr_Occurred())
        return list;
    Py_DECREF(list);
    return NULL;
}

static PyObject *Engine_counters(Engine *self, PyObject *none)
{
    (void)none;
    engine_totals t;
    engine *e = core_of(self);
    PyObject *latency = e ? PyTuple_New(LATENCY_BUCKETS) : NULL;
    if (!latency)
        return NULL;
    engine_totals_now(e, &t);
    for (int i = 0; i < LATENCY_BUCKETS; i++) {
        PyObject *count = PyLong_FromLongLong(t.latency[i]);
        if (!count || PyTuple_SetItem(latency, i, count)) {
            Py_DECREF(latency);
            return NULL;
        }
    }
    return Py_BuildValue("LLLLdLNLLLL", (long long)t.metadata_ops, (long long)t.reads,
                         (long long)t.bytes, (long long)t.retries, (double)t.read_ns * 1e-9,
                         (long long)t.peak, latency, (long long)t.direct_bytes,
                         (long long)t.fallback_files, (long long)t.dropped_files,
                         (long long)t.in_flight);
}

static PyObject *Engine_reset_peak(Engine *self, PyObject *none)
{
    (void)none;
    engine *e = core_of(self);
    if (!e)
        return NULL;
    engine_reset_peak(e);
    Py_RETURN_NONE;
}

static PyObject *Engine_set_concurrency(Engine *self, PyObject *args)
{
    int concurrency;
    long long scratch_part;
    engine *e = core_of(self);
    if (!e || !PyArg_ParseTuple(args, "iL", &concurrency, &scratch_part))
        return NULL;
    if (concurrency < 1 || scratch_part < 4096 || scratch_part % 4096)
        return refuse("an option of the engine is out of range");
    engine_set_concurrency(e, concurrency, scratch_part);
    Py_RETURN_NONE;
}

static PyObject *Engine_oldest(Engine *self, PyObject *none)
{
    (void)none;
    char name[4096];
    int64_t length = sizeof name;
    engine *e = core_of(self);
    if (!e)
        return NULL;
    int64_t ns = engine_oldest_ns(e, name, &length);
    return Py_BuildValue("dy#", (double)ns * 1e-9, name, (Py_ssize_t)length);
}

/* Memory that a left-behind thread may still write into stays exported for ever. */
static int shut(Engine *self, double grace_s)
{
    int left = 0;
    engine *core = self->core;
    if (!core)
        return 0;
    self->core = NULL;
    if (engine_pid(core) == (int)getpid()) {
        Py_BEGIN_ALLOW_THREADS
        left = engine_close(core, (int64_t)(grace_s * 1e9));
        Py_END_ALLOW_THREADS
    } else {
        engine_abandon(core);
    }
    if (self->attached && !left)
        PyBuffer_Release(&self->memory);
    self->attached = 0;
    return left;
}

static PyObject *Engine_close(Engine *self, PyObject *args)
{
    double grace_s = 0.2;
    if (!PyArg_ParseTuple(args, "|d", &grace_s))
        return NULL;
    return PyLong_FromLong(shut(self, grace_s));
}

static void Engine_dealloc(Engine *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    shut(self, 0.2);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"fileno", (PyCFunction)Engine_fileno, METH_NOARGS, NULL},
    {"attach", (PyCFunction)Engine_attach, METH_O, NULL},
    {"measure", (PyCFunction)Engine_measure, METH_VARARGS, NULL},
    {"fetch", (PyCFunction)Engine_fetch, METH_VARARGS, NULL},
    {"read", (PyCFunction)Engine_read, METH_VARARGS, NULL},
    {"discard", (PyCFunction)Engine_discard, METH_O, NULL},
    {"settled", (PyCFunction)Engine_settled, METH_VARARGS, NULL},
    {"collect", (PyCFunction)Engine_collect, METH_NOARGS, NULL},
    {"is_calm", (PyCFunction)Engine_is_calm, METH_NOARGS, NULL},
    {"counters", (PyCFunction)Engine_counters, METH_NOARGS, NULL},
    {"reset_peak", (PyCFunction)Engine_reset_peak, METH_NOARGS, NULL},
    {"set_concurrency", (PyCFunction)Engine_set_concurrency, METH_VARARGS, NULL},
    {"oldest", (PyCFunction)Engine_oldest, METH_NOARGS, NULL},
    {"close", (PyCFunction)Engine_close, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_init, (void *)Engine_init},
    {Py_tp_dealloc, (void *)Engine_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Bulk reads of POSIX files by threads that never hold the GIL."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "rayloader.storage._native.Engine",
    .basicsize = sizeof(Engine),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

static int fill_module(PyObject *module)
{
    PyObject *errors = PyImport_ImportModule("rayloader.errors");
    Py_CLEAR(usage_error);
    usage_error = errors ? PyObject_GetAttrString(errors, "UsageError") : NULL;
    Py_XDECREF(errors);
    if (!usage_error)
        return -1;
    PyObject *type = PyType_FromSpec(&spec);
    int failed = !type || PyModule_AddObjectRef(module, "Engine", type) ||
                 PyModule_AddIntMacro(module, FILE_NOT_REGULAR) ||
                 PyModule_AddIntMacro(module, FILE_TRUNCATED) ||
                 PyModule_AddIntMacro(module, FILE_NO_DIRECT) ||
                 PyModule_AddIntMacro(module, FILE_REPLACED) ||
                 PyModule_AddIntMacro(module, FILE_BAD_NAME) ||
                 PyModule_AddIntMacro(module, FILE_RESIZED);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)fill_module}, {0, NULL}};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "The POSIX engine in C.",
    .m_size = 0,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
