/* The main function of the worker program, see worker.c. */
int worker_main(int argc, char **argv);

int main(int argc, char **argv)
{
    return worker_main(argc, argv);
}
